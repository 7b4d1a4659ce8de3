// The picture of a step in time: what ranks compute and send, row by row, and under it what they hold for a while.
"use strict";
globalThis.fsdp ??= {};
(() => {
    const { svg, grouped, humanBytes, seconds } = fsdp;

    /** Where rows begin, right of their names, and their height, in pixels. */
    const LEFT = 64;
    const ROW = 20;

    /** The rows of a rank. */
    fsdp.ROWS = ["compute", "gather", "reduce"];

    /** What a kind of ranks is called. */
    const kindName = (report, kind) => {
        const { rank, count } = report.kinds[kind];
        if (kind === 1) return `rank ${rank}, slower`;
        if (report.kinds.length === 2) return count === 1 ? `rank ${rank}` : `ranks 0 to ${count - 1}`;
        return count === 1 ? "the only rank" : `each of ${grouped(count)} ranks`;
    };

    /** A span, with the number of its unit where there is room. */
    const spanPicture = (span, from, to, y) => {
        const name = `${span.what} ${span.unit === null ? "gradient norm" : `units.${span.unit}`}`;
        const data = JSON.stringify([fsdp.ROWS.indexOf(span.row), name, span.start, span.end]);
        const place = { x: from, y, width: Math.max(to - from, 0.5), height: ROW - 2 };
        const title = svg("title", {}, `${name}: ${seconds(span.end - span.start)}`);
        const rect = svg("rect", { class: span.what, ...place, "data-span": data }, title);
        if (span.unit === null || span.what === "wait" || to - from <= 14) return [rect];
        const middle = { x: (from + to) / 2, y: y + 13, "text-anchor": "middle" };
        return [rect, svg("text", { class: "on-part", ...middle }, String(span.unit))];
    };

    /** Three rows for each kind of ranks. */
    const rowsPicture = (report, axis) => {
        const children = [];
        let y = 0;
        report.kinds.forEach((_, kind) => {
            children.push(svg("text", { x: 0, y: y + 13, class: "head" }, kindName(report, kind)));
            y += ROW;
            for (const row of fsdp.ROWS) {
                children.push(svg("text", { x: 0, y: y + 14 }, row), axis.ground(y + ROW - 1));
                for (const span of report.spans) {
                    if (span.kind !== kind || span.row !== row || span.start > report.step_s) continue;
                    children.push(...spanPicture(span, axis.at(span.start), axis.at(span.end), y));
                }
                y += ROW;
            }
            y += 6;
        });
        return { children, bottom: y };
    };

    /** What the first rank holds beside blocks, whenever that changes: bytes of gathered units, and of whole gradients. */
    const heldOverTime = (report, work) => {
        const [gathered, whole] = [new Set(), new Set()];
        const bytes = (units) => [...units].reduce((sum, unit) => sum + work[unit].bytes, 0);
        const isWhole = ({ of, state }) => {
            if (of === "parameters") return state !== "block";
            return state === "whole" || state === "reducing" || (state === "reduced" && report.stage === 0);
        };
        const events = report.events.filter((event) => event.kind === 0).toSorted((one, two) => one.at - two.at);
        return events.map((event) => {
            const units = event.of === "parameters" ? gathered : whole;
            if (isWhole(event)) units.add(event.unit);
            else units.delete(event.unit);
            return { at: event.at, gathered: bytes(gathered), whole: bytes(whole) };
        });
    };

    /** Gathered units, and whole gradients above them, as steps. */
    const heldPicture = (report, work, axis, top) => {
        const held = heldOverTime(report, work);
        const most = held.reduce((most, { gathered, whole }) => Math.max(most, gathered + whole), 0);
        const [height, bottom] = [54, top + 72];
        const level = (bytes) => bottom - (most > 0 ? (bytes / most) * height : 0);
        const area = (colour, of) => {
            // What holds when the step begins, then a step down or up at each change.
            const first = held.findLast(({ at }) => at <= 0);
            let [before, path] = [first ? of(first) : 0, ""];
            path = `M ${axis.at(0)} ${bottom} V ${level(before)}`;
            for (const change of held.filter(({ at }) => at > 0 && at <= report.step_s)) {
                before = of(change);
                path += ` H ${axis.at(change.at)} V ${level(before)}`;
            }
            return svg("path", { class: `area ${colour}`, d: `${path} H ${axis.at(report.step_s)} V ${bottom} Z` });
        };
        const told = `whole units and gradients: up to ${humanBytes(most)}`;
        const children = [
            svg("text", { x: 0, y: top + 12, class: "head" }, told),
            area("whole", ({ gathered, whole }) => gathered + whole),
            area("gathered", ({ gathered }) => gathered),
            axis.ground(bottom),
        ];
        return { children, top: bottom - height, bottom };
    };

    /** Times at round numbers, about six on a wide picture. */
    const ticksPicture = (report, axis, width, y) => {
        const rough = report.step_s / (width < 480 ? 3 : 6);
        const power = 10 ** Math.floor(Math.log10(rough));
        const unit = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough);
        const times = Array.from({ length: Math.floor(report.step_s / unit) + 1 }, (_, index) => index * unit);
        return times.flatMap((time, index) => {
            const x = axis.at(time);
            const anchor = index === 0 ? "start" : x > width - 30 ? "end" : "middle";
            const told = seconds(time).replace(/\.?0+ /, " ");
            return [
                svg("line", { class: "ground", x1: x, x2: x, y1: y, y2: y + 4 }),
                svg("text", { class: "tick", x, y: y + 17, "text-anchor": anchor }, told),
            ];
        });
    };

    /**
     * The picture of a simulated step, so many pixels wide. `place` puts the line that marks a moment; `momentAt` is the
     * moment, in seconds, under a pointer.
     */
    fsdp.timeline = (width, report, work) => {
        const right = width - 1;
        const within = (moment) => Math.min(Math.max(moment, 0), report.step_s);
        const axis = {
            at: (moment) => LEFT + (within(moment) / report.step_s) * (right - LEFT),
            ground: (y) => svg("line", { class: "ground", x1: LEFT, x2: right, y1: y, y2: y }),
        };
        const rows = rowsPicture(report, axis);
        const held = heldPicture(report, work, axis, rows.bottom);
        const ticks = ticksPicture(report, axis, width, held.bottom);
        // Above and below the text between them.
        const ends = [
            [16, rows.bottom - 4],
            [held.top, held.bottom],
        ];
        const lines = ends.map(([y1, y2]) => svg("line", { class: "playhead", y1, y2 }));
        const names = report.kinds.map((_, kind) => kindName(report, kind)).join(" and ");
        const label = `A step of ${seconds(report.step_s)}: computation, gathers and reductions of ${names}.`;
        const parts = [...rows.children, ...held.children, ...ticks, ...lines];
        const picture = fsdp.picture(width, held.bottom + 22, label, ...parts);
        picture.classList.add("timeline");
        const place = (moment) => {
            for (const line of lines) for (const end of ["x1", "x2"]) line.setAttribute(end, axis.at(moment));
        };
        const momentAt = (event) => {
            const box = picture.getBoundingClientRect();
            const x = ((event.clientX - box.left) / box.width) * width;
            return within(((x - LEFT) / (right - LEFT)) * report.step_s);
        };
        return { picture, place, momentAt };
    };
})();

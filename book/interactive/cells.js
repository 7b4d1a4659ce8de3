// The picture of what ranks hold at a moment of a step: for each unit its parameters, and its gradients below.
"use strict";
globalThis.fsdp ??= {};
(() => {
    const { svg, grouped, seconds } = fsdp;

    /** Where cells begin, right of the ranks' names; the height of a half of a cell, and of a line, in pixels. */
    const LEFT = 64;
    const HALF = 13;
    const LINE = 2 * HALF + 14;

    /** The last state of a unit at a moment. */
    const stateAt = (report, kind, of, unit, moment) => {
        let last = null;
        for (const event of report.events) {
            const isIts = event.kind === kind && event.of === of && event.unit === unit && event.at <= moment;
            if (isIts && (last === null || event.at >= last.at)) last = event;
        }
        return last?.state ?? (of === "gradients" ? "none" : "block");
    };

    /** One unit of one rank, in a place of `x`, `y` and `width`. */
    const cellPicture = (report, { rank, kind, unit, moment }, { x, y, width }) => {
        const whole = { x, width };
        const block = { x: x + (rank / report.ranks) * width, width: Math.max(width / report.ranks, 1.5) };
        const parameters = { y, height: HALF };
        const gradients = { y: y + HALF, height: HALF };
        const children = [
            svg("rect", { class: "cell", ...whole, ...parameters }),
            svg("rect", { class: "cell", ...whole, ...gradients }),
        ];
        const isCut = report.stage === 3 && report.ranks > 1;
        const held = isCut ? stateAt(report, kind, "parameters", unit, moment) : "whole";
        // What is on its way comes to the block that is there.
        if (held !== "whole") children.push(svg("rect", { class: "parameters", ...block, ...parameters }));
        if (held !== "block") children.push(svg("rect", { class: `parameters ${held}`, ...whole, ...parameters }));
        const made = stateAt(report, kind, "gradients", unit, moment);
        if (made !== "none") {
            const width = made === "reduced" && report.stage > 0 ? block : whole;
            children.push(svg("rect", { class: `gradients ${made}`, ...width, ...gradients }));
        }
        return children;
    };

    /** The cells of up to four ranks at a moment of a simulated step of `units`, so many pixels wide. */
    fsdp.cells = (width, report, units, moment) => {
        const { ranks } = report;
        const isShort = ranks > 4;
        const shown = isShort ? [0, 1, 2, ranks - 1] : Array.from({ length: ranks }, (_, rank) => rank);
        const gap = width < 480 ? 3 : 6;
        const cell = (width - LEFT - 2) / units - gap;
        const left = (unit) => LEFT + 1 + unit * (cell + gap);
        const children = [svg("text", { x: 0, y: 12 }, "unit")];
        for (let unit = 0; unit < units; unit += width > 600 || units <= 12 ? 1 : 2) {
            children.push(svg("text", { x: left(unit) + cell / 2, y: 12, "text-anchor": "middle" }, String(unit)));
        }
        let y = 22;
        for (const rank of shown) {
            if (isShort && rank === ranks - 1) {
                children.push(svg("text", { x: LEFT, y: y + 6 }, `… ${grouped(ranks - 4)} more`));
                y += 16;
            }
            children.push(svg("text", { x: 0, y: y + 17 }, `rank ${rank}`));
            const kind = rank === ranks - 1 ? report.kinds.length - 1 : 0;
            const span = fsdp.spanAt(report, kind, "compute", moment);
            for (let unit = 0; unit < units; unit += 1) {
                const x = left(unit);
                children.push(...cellPicture(report, { rank, kind, unit, moment }, { x, y, width: cell }));
                if (span?.unit === unit && span.what !== "wait") {
                    const frame = { x: x - 2, y: y - 3, width: cell + 4, height: 2 * HALF + 6 };
                    children.push(svg("rect", { class: "working", ...frame }));
                }
            }
            y += LINE;
        }
        const label = `What ${ranks === 1 ? "the rank holds" : "ranks hold"} of each unit after ${seconds(moment)}.`;
        return fsdp.picture(width, y, label, ...children);
    };

    /** What a kind of ranks does in a row at a moment. */
    fsdp.spanAt = (report, kind, row, moment) =>
        report.spans.find((of) => of.kind === kind && of.row === row && of.start <= moment && moment < of.end);

    const WORDS = {
        forward: "computes unit # in forward",
        backward: "computes unit # in backward",
        step: "steps unit #",
        wait: "stands still for unit #",
        gather: "unit # is being gathered",
        reduce: "the gradients of unit # are being reduced",
        publish: "the new parameters of unit # are being gathered",
    };

    /** What happens at a moment, as a sentence. */
    fsdp.toldAt = (report, moment) => {
        const told = (span) => WORDS[span.what].replace("#", span.unit);
        const kinds = report.kinds.map(({ rank, count }, kind) => {
            const [compute, ...others] = fsdp.ROWS.map((row) => fsdp.spanAt(report, kind, row, moment));
            const alike = report.ranks === 1 ? "the rank" : "each rank";
            const apart = count > 1 ? "a fast rank" : `rank ${rank}`;
            const isNorm = compute?.unit === null;
            const does = isNorm ? "waits for the norm of the gradients" : compute ? told(compute) : "is done";
            return [`${report.kinds.length === 1 ? alike : apart} ${does}`, ...others.filter(Boolean).map(told)].join(
                "; ",
            );
        });
        return `After ${seconds(moment)} ${kinds.join(". Meanwhile ")}.`;
    };
})();

// The page "A step in time": a simulated step on several ranks, as `fsdp simulate` runs it, to be played and scrubbed.
"use strict";
(() => {
    const { html, svg, grouped, humanBytes, seconds } = fsdp;

    const STAGES = [0, 1, 2, 3];
    const PARAMETERS = 1e9;

    /** Seconds that a step is played in. */
    const PLAYED_S = 12;

    const range = (from, to) => Array.from({ length: to - from + 1 }, (_, at) => from + at);
    const readNumber = (text) => (/^\s*[0-9]*\.?[0-9]+\s*$/.test(text) ? Number(text) : null);

    const FIELDS = [
        { name: "stage", kind: "choice", label: "Stage", value: 3, options: STAGES.map((stage) => [stage, ["0, DDP", "1", "2", "3, FSDP"][stage]]) },
        { name: "ranks", kind: "number", label: "Ranks", value: 4, stops: [1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024], most: 16384 },
        { name: "units", kind: "number", label: "Units", value: 8, stops: range(1, 24), most: 24 },
        { name: "prefetch", kind: "number", label: "Prefetch depth", value: 1, stops: range(0, 6), least: 0, most: 24 },
        { name: "alpha", kind: "number", label: "Latency α, µs", value: 10, stops: [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000], read: readNumber, least: 0, most: 100000 },
        { name: "bandwidth", kind: "number", label: "Bandwidth 1/β, GB/s", value: 25, stops: [1, 1.25, 2, 3.125, 5, 8, 12.5, 25, 31.5, 50, 63, 100, 200, 300, 450, 900], read: readNumber, least: 0.001, most: 10000 },
        { name: "tokens", kind: "number", label: "Tokens of a rank", value: 2048, stops: [128, 256, 512, 1024, 2048, 4096, 8192, 16384], most: 1000000 },
        { name: "slower", kind: "number", label: "Last rank slower by", value: 1, stops: [1, 1.05, 1.1, 1.25, 1.5, 2, 3], read: readNumber, least: 1, most: 100, hint: "1: as fast as the others" },
    ];

    const setting = (state, stage) => ({
        stage,
        parameters: PARAMETERS,
        units: state.units,
        ranks: state.ranks,
        prefetch: state.prefetch,
        alphaUs: state.alpha,
        bandwidth: state.bandwidth,
        tokens: state.tokens,
        slower: state.slower,
    });

    const commands = (state) => {
        const lines = [`stage = ${state.stage}`, `world_size = ${state.ranks}`, "", "[prefetch]", `forward = ${state.prefetch}`, `backward = ${state.prefetch}`];
        const words = [
            "fsdp simulate --config run.toml",
            `--params ${fsdp.count(PARAMETERS)} --units ${state.units} --sequence ${state.tokens}`,
            `--gpus-per-node ${state.ranks} --alpha-us ${state.alpha} --bandwidth ${state.bandwidth}`,
        ];
        if (state.slower !== 1) words.push(`--straggler ${state.ranks - 1}:${state.slower}`);
        return [`${lines.join("\n")}\n`, words.join(" ")];
    };

    /** What a rank spends time on: the colour of each kind of span, and its name. */
    const KINDS = [
        ["forward", "forward"],
        ["backward", "backward"],
        ["step", "optimizer step"],
        ["wait", "stands still"],
        ["gather", "gather"],
        ["reduce", "reduce"],
        ["publish", "publish"],
    ];
    const ROWS = ["compute", "gather", "reduce"];

    /** The names of kinds of ranks. */
    const kindName = (report, kind) => {
        const { rank, count } = report.kinds[kind];
        if (report.kinds.length === 1) return report.ranks === 1 ? "the only rank" : `each of ${grouped(report.ranks)} ranks`;
        return kind === 1 ? `rank ${rank}, slower` : count === 1 ? `rank ${rank}` : `ranks 0 to ${count - 1}`;
    };

    /** Times of the axis: about six, at round numbers. */
    const ticks = (until) => {
        const rough = until / 6;
        const power = 10 ** Math.floor(Math.log10(rough));
        const unit = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough);
        return Array.from({ length: Math.floor(until / unit) + 1 }, (_, at) => at * unit);
    };

    /** What is held beside blocks at the times at which that changes: gathered units, and whole gradients. */
    const comesAndGoes = (report, work, kind) => {
        const events = report.events.filter((event) => event.kind === kind).toSorted((one, two) => one.at - two.at);
        const [gathered, whole] = [new Set(), new Set()];
        const bytes = (units) => [...units].reduce((sum, unit) => sum + work[unit].bytes, 0);
        const steps = [];
        for (const { of, unit, state, at } of events) {
            const units = of === "parameters" ? gathered : whole;
            const isWhole = of === "parameters" ? state !== "block" : state === "whole" || state === "reducing" || (state === "reduced" && report.stage === 0);
            if (isWhole) units.add(unit);
            else units.delete(unit);
            steps.push({ at, gathered: bytes(gathered), whole: bytes(whole) });
        }
        return steps;
    };

    const LEFT = 64;
    const ROW = 20;

    const timeline = (width, report, work) => {
        const scale = (at) => LEFT + (at / report.step_s) * (width - LEFT - 1);
        const clip = (at) => Math.min(Math.max(at, 0), report.step_s);
        const children = [];
        let y = 0;
        report.kinds.forEach((_, kind) => {
            children.push(svg("text", { x: 0, y: y + 13, class: "head" }, kindName(report, kind)));
            y += 20;
            for (const row of ROWS) {
                children.push(svg("text", { x: 0, y: y + 14 }, row), svg("line", { class: "ground", x1: LEFT, x2: width, y1: y + ROW - 1, y2: y + ROW - 1 }));
                for (const span of report.spans.filter((span) => span.kind === kind && span.row === row)) {
                    const [from, to] = [scale(clip(span.start)), scale(clip(span.end))];
                    if (span.end <= 0 || span.start > report.step_s) continue;
                    const unit = span.unit === null ? "gradient norm" : `units.${span.unit}`;
                    const told = `${span.what} ${unit}: ${seconds(span.end - span.start)}`;
                    const data = JSON.stringify([ROWS.indexOf(row), `${span.what} ${unit}`, span.start, span.end]);
                    const rect = svg("rect", { class: span.what, x: from, y, width: Math.max(to - from, 0.5), height: ROW - 2, "data-span": data }, svg("title", {}, told));
                    const isLabelled = span.unit !== null && span.what !== "wait" && to - from > 14;
                    const label = isLabelled ? [svg("text", { class: "on-part", x: (from + to) / 2, y: y + 13, "text-anchor": "middle" }, String(span.unit))] : [];
                    children.push(rect, ...label);
                }
                y += ROW;
            }
            y += 6;
        });
        // What comes and goes, as steps.
        const height = 54;
        const top = y - 4;
        const held = comesAndGoes(report, work, 0);
        const most = Math.max(...held.map((at) => at.gathered + at.whole), 1);
        const level = (bytes) => y + 18 + height - (bytes / most) * height;
        children.push(svg("text", { x: 0, y: y + 12, class: "head" }, `gathered units and whole gradients: ${humanBytes(most === 1 ? 0 : most)} at most`));
        const areas = [["whole", (at) => at.gathered + at.whole], ["gathered", (at) => at.gathered]];
        for (const [colour, of] of areas) {
            let path = `M ${scale(0)} ${level(0)}`;
            let before = 0;
            for (const at of held) {
                if (at.at > 0) path += ` L ${scale(clip(at.at))} ${level(before)} L ${scale(clip(at.at))} ${level(of(at))}`;
                before = at.at > report.step_s ? before : of(at);
                if (at.at <= 0) path = `M ${scale(0)} ${level(0)} L ${scale(0)} ${level(before)}`;
            }
            path += ` L ${scale(report.step_s)} ${level(before)} L ${scale(report.step_s)} ${level(0)} Z`;
            children.push(svg("path", { class: `area ${colour}`, d: path }));
        }
        y += 18 + height;
        children.push(svg("line", { class: "ground", x1: LEFT, x2: width, y1: y, y2: y }));
        const shown = ticks(report.step_s);
        const every = width < 480 ? 2 : 1;
        shown.forEach((at, index) => {
            if (index % every > 0) return;
            const x = scale(at);
            const anchor = index === 0 ? "start" : x > width - 30 ? "end" : "middle";
            children.push(svg("line", { class: "ground", x1: x, x2: x, y1: y, y2: y + 4 }), svg("text", { class: "tick", x, y: y + 17, "text-anchor": anchor }, seconds(at).replace(/\.?0+ /, " ")));
        });
        // Beside the text between them.
        const playhead = [[16, top], [y - height, y]].map(([y1, y2]) => svg("line", { class: "playhead", x1: LEFT, x2: LEFT, y1, y2 }));
        const label = `A step of ${seconds(report.step_s)}: rows of computation, gathers and reductions for ${report.kinds.map((_, kind) => kindName(report, kind)).join(" and ")}.`;
        const picture = fsdp.picture(width, y + 22, label, ...children, ...playhead);
        picture.classList.add("timeline");
        const place = (moment) => {
            const x = scale(moment);
            for (const line of playhead) for (const end of ["x1", "x2"]) line.setAttribute(end, x);
        };
        const momentAt = (event) => {
            const box = picture.getBoundingClientRect();
            const x = ((event.clientX - box.left) / box.width) * width;
            return clip(((x - LEFT) / (width - LEFT - 1)) * report.step_s);
        };
        return { picture, place, momentAt };
    };

    /** The last state of a unit at a moment. */
    const stateAt = (report, kind, of, unit, moment) => {
        const at = (event) => event.kind === kind && event.of === of && event.unit === unit && event.at <= moment;
        const last = report.events.filter(at).reduce((latest, event) => (latest === null || event.at >= latest.at ? event : latest), null);
        return last?.state ?? (of === "gradients" ? "none" : "block");
    };

    /** What each rank holds of each unit at a moment. */
    const cells = (width, report, moment) => {
        const { ranks, stage, units } = { ...report, units: report.units };
        const shown = ranks <= 4 ? range(0, ranks - 1) : [0, 1, 2, ranks - 1];
        const kindOf = (rank) => (report.kinds.length === 2 && rank === ranks - 1 ? 1 : 0);
        const [gap, half] = [width < 480 ? 3 : 6, 13];
        const cell = (width - LEFT - 2) / units - gap;
        const children = [];
        const skipped = ranks > 4 ? 16 : 0;
        shown.forEach((rank, index) => {
            const kind = kindOf(rank);
            const y = 22 + index * (2 * half + 14) + (ranks > 4 && index === 3 ? skipped : 0);
            children.push(svg("text", { x: 0, y: y + 17 }, `rank ${rank}`));
            if (ranks > 4 && index === 3) children.push(svg("text", { x: LEFT, y: y - 10 }, `… ${grouped(ranks - 4)} more`));
            const computing = report.spans.find((span) => span.kind === kind && span.row === "compute" && span.start <= moment && moment < span.end);
            for (let unit = 0; unit < units; unit += 1) {
                const x = LEFT + 1 + unit * (cell + gap);
                const slice = { x: x + (rank / ranks) * cell, width: Math.max(cell / ranks, 1.5) };
                const whole = { x, width: cell };
                const parameters = stage === 3 && ranks > 1 ? stateAt(report, kind, "parameters", unit, moment) : "whole";
                const gradients = stateAt(report, kind, "gradients", unit, moment);
                const shape = { parameters: { block: slice, gathering: whole, whole }, gradients: { whole, reducing: whole, reduced: stage === 0 ? whole : slice } };
                children.push(svg("rect", { class: "cell", x, y, width: cell, height: half }), svg("rect", { class: "cell", x, y: y + half, width: cell, height: half }));
                if (parameters === "gathering") children.push(svg("rect", { class: "parameters", ...slice, y, height: half }));
                children.push(svg("rect", { class: `parameters ${parameters}`, ...shape.parameters[parameters], y, height: half }));
                if (gradients !== "none") children.push(svg("rect", { class: `gradients ${gradients}`, ...shape.gradients[gradients], y: y + half, height: half }));
                if (computing?.unit === unit && computing.what !== "wait") {
                    children.push(svg("rect", { class: `working ${computing.what}`, x: x - 2, y: y - 3, width: cell + 4, height: 2 * half + 6 }));
                }
                if (index === 0 && (units <= 12 || width > 600 || unit % 2 === 0)) children.push(svg("text", { x: x + cell / 2, y: 12, "text-anchor": "middle" }, String(unit)));
            }
        });
        children.push(svg("text", { x: 0, y: 12 }, "unit"));
        const bottom = 22 + shown.length * (2 * half + 14) + skipped;
        return fsdp.picture(width, bottom, `What ${shown.length === 1 ? "the rank holds" : "ranks hold"} of each unit after ${seconds(moment)}.`, ...children);
    };

    /** What happens at a moment, as a sentence. */
    const told = (report, moment) => {
        const now = (kind, row) => report.spans.find((span) => span.kind === kind && span.row === row && span.start <= moment && moment < span.end);
        const words = { forward: "computes unit # in forward", backward: "computes unit # in backward", step: "steps unit #", gather: "unit # is being gathered", reduce: "the gradients of unit # are being reduced", publish: "the new parameters of unit # are being gathered" };
        const kinds = report.kinds.map((_, kind) => {
            const [compute, gather, reduce] = ROWS.map((row) => now(kind, row));
            const does = !compute ? "is done" : compute.what === "wait" ? (compute.unit === null ? "waits for the norm of the gradients" : `stands still for unit ${compute.unit}`) : words[compute.what].replace("#", compute.unit);
            const meanwhile = [gather, reduce].filter(Boolean).map((span) => words[span.what].replace("#", span.unit));
            const name = report.kinds.length === 1 ? (report.ranks === 1 ? "the rank" : "each rank") : report.kinds[kind].count > 1 ? "a fast rank" : `rank ${report.kinds[kind].rank}`;
            return [`${name} ${does}`, ...meanwhile].join("; ");
        });
        return `After ${seconds(moment)} ${kinds.join(". Meanwhile ")}.`;
    };

    const summary = (report) => {
        const hidden = report.overlap === null ? "Nothing is sent." : `${fsdp.fixed(100 * report.overlap, 1)}% of the communication is hidden.`;
        return `A step takes ${seconds(report.step_s)}: a rank computes for ${seconds(report.compute_s)} and stands still for ${seconds(report.exposed_s)}. ${hidden}`;
    };

    /** All stages in numbers. */
    const overview = (state, reports) => {
        const rows = STAGES.map((stage) => {
            const report = reports[stage];
            const value = (name, text) => fsdp.value(`${stage}.${name}`, report[name], text);
            return {
                attributes: stage === state.stage ? { class: "chosen" } : {},
                cells: [
                    `stage ${stage}`,
                    value("step_s", seconds(report.step_s)),
                    value("compute_s", seconds(report.compute_s)),
                    value("exposed_s", seconds(report.exposed_s)),
                    value("communication_s", seconds(report.communication_s)),
                    value("overlap", report.overlap === null ? "–" : `${fsdp.fixed(100 * report.overlap, 1)}%`),
                    value("sent_bytes", humanBytes(report.sent_bytes)),
                    value("messages", grouped(report.messages)),
                    value("peak_gathered_bytes", humanBytes(report.peak_gathered_bytes)),
                ],
            };
        });
        return fsdp.table("All stages", ["", "step", "computes", "stands still", "communicates", "hidden", "sends", "messages", "gathered"], rows);
    };

    /** Where the playhead is, as a share of the step; and what moves it. */
    let share = 0.3;
    let playing = null;

    fsdp.widget("step", FIELDS, (state, width) => {
        const reports = STAGES.map((stage) => fsdp.simulate(setting(state, stage)));
        const report = { ...reports[state.stage], units: state.units };
        const work = fsdp.work(setting(state, state.stage));
        const line = timeline(width, report, work);
        const slider = html("input", { type: "range", min: 0, max: 1000, "aria-label": "Time in the step" });
        const button = html("button", { type: "button" });
        const clock = html("output", {});
        const now = html("p", { class: "now" });
        const grid = html("div", { class: "cells" });
        const seek = (to) => {
            share = Math.min(Math.max(to, 0), 1);
            // The last moment of a step is the first of the next.
            const moment = Math.min(share * report.step_s, report.step_s * (1 - 1e-9));
            slider.value = Math.round(share * 1000);
            slider.setAttribute("aria-valuetext", `${seconds(moment)} of ${seconds(report.step_s)}`);
            clock.textContent = seconds(share * report.step_s);
            line.place(moment);
            now.textContent = told(report, moment);
            grid.replaceChildren(cells(width, report, moment));
        };
        const play = (is) => {
            if (playing !== null) cancelAnimationFrame(playing);
            playing = null;
            button.textContent = is ? "Pause" : "Play";
            if (!is) return;
            let before = performance.now();
            const frame = (time) => {
                seek(share + (time - before) / (1000 * PLAYED_S));
                before = time;
                if (share < 1) playing = requestAnimationFrame(frame);
                else play(false);
            };
            if (share >= 1) seek(0);
            playing = requestAnimationFrame(frame);
        };
        button.addEventListener("click", () => play(playing === null));
        slider.addEventListener("input", () => {
            play(false);
            seek(Number(slider.value) / 1000);
        });
        const drag = (event) => {
            if (event.buttons !== 1) return;
            play(false);
            seek(line.momentAt(event) / report.step_s);
        };
        line.picture.addEventListener("pointerdown", drag);
        line.picture.addEventListener("pointermove", drag);
        const [toml, command] = commands(state);
        const isPlaying = playing !== null;
        seek(share);
        play(isPlaying);
        return {
            scene: [
                html("p", { class: "summary", role: "status" }, summary(report)),
                html("div", { class: "transport" }, button, slider, clock),
                line.picture,
                fsdp.key(KINDS.filter(([what]) => report.spans.some((span) => span.what === what))),
                now,
                grid,
                fsdp.key([["parameters", "parameters"], ["gradients", "gradients"], ["moving", "on their way"]]),
            ],
            numbers: [overview(state, reports), ...fsdp.commands("The same step as a file, and the command:", toml, command)],
        };
    });
})();

// The page "A step in time": a simulated step on several ranks, as `fsdp simulate` runs it, to be played and scrubbed.
"use strict";
(() => {
    const { html, grouped, humanBytes, seconds } = fsdp;

    const STAGES = [0, 1, 2, 3];
    const PARAMETERS = 1e9;

    /** Seconds that a step is played in. */
    const PLAYED_S = 12;

    const range = (from, to) => Array.from({ length: to - from + 1 }, (_, at) => from + at);
    const readNumber = (text) => (/^\s*[0-9]*\.?[0-9]+\s*$/.test(text) ? Number(text) : null);

    const FIELDS = [
        {
            name: "stage",
            kind: "choice",
            label: "Stage",
            value: 3,
            options: STAGES.map((stage) => [stage, ["0, DDP", "1", "2", "3, FSDP"][stage]]),
        },
        {
            name: "ranks",
            kind: "number",
            label: "Ranks",
            value: 4,
            stops: [1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024],
            most: 16384,
        },
        { name: "units", kind: "number", label: "Units", value: 8, stops: range(1, 24), most: 24 },
        { name: "prefetch", kind: "number", label: "Prefetch depth", value: 1, stops: range(0, 6), least: 0, most: 24 },
        {
            name: "alpha",
            kind: "number",
            label: "Latency α, µs",
            value: 10,
            stops: [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000],
            read: readNumber,
            least: 0,
            most: 100000,
        },
        {
            name: "bandwidth",
            kind: "number",
            label: "Bandwidth 1/β, GB/s",
            value: 25,
            stops: [1, 1.25, 2, 3.125, 5, 8, 12.5, 25, 31.5, 50, 63, 100, 200, 300, 450, 900],
            read: readNumber,
            least: 0.001,
            most: 10000,
        },
        {
            name: "tokens",
            kind: "number",
            label: "Tokens of a rank",
            value: 2048,
            stops: [128, 256, 512, 1024, 2048, 4096, 8192, 16384],
            most: 1000000,
        },
        {
            name: "slower",
            kind: "number",
            label: "Last rank slower by",
            value: 1,
            stops: [1, 1.05, 1.1, 1.25, 1.5, 2, 3],
            read: readNumber,
            least: 1,
            most: 100,
            hint: "1: as fast as the others",
        },
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
        const lines = [
            `stage = ${state.stage}`,
            `world_size = ${state.ranks}`,
            "",
            "[prefetch]",
            `forward = ${state.prefetch}`,
            `backward = ${state.prefetch}`,
        ];
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

    const summary = (report) => {
        const hidden =
            report.overlap === null
                ? "Nothing is sent."
                : `${fsdp.fixed(100 * report.overlap, 1)}% of the communication is hidden.`;
        const [step, computes, still] = [report.step_s, report.compute_s, report.exposed_s].map(seconds);
        return `A step takes ${step}: a rank computes for ${computes} and stands still for ${still}. ${hidden}`;
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
        return fsdp.table(
            "All stages",
            ["", "step", "computes", "stands still", "communicates", "hidden", "sends", "messages", "gathered"],
            rows,
        );
    };

    /** Where the playhead is, as a share of the step; and what moves it. */
    let share = 0.3;
    let playing = null;

    fsdp.widget("step", FIELDS, (state, width) => {
        const reports = STAGES.map((stage) => fsdp.simulate(setting(state, stage)));
        const report = reports[state.stage];
        const work = fsdp.work(setting(state, state.stage));
        const line = fsdp.timeline(width, report, work);
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
            now.textContent = fsdp.toldAt(report, moment);
            grid.replaceChildren(fsdp.cells(width, report, state.units, moment));
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
                fsdp.key([
                    ["parameters", "parameters"],
                    ["gradients", "gradients"],
                    ["moving", "on their way"],
                ]),
            ],
            numbers: [
                overview(state, reports),
                ...fsdp.commands("The same step as a file, and the command:", toml, command),
            ],
        };
    });
})();

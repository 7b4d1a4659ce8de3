// The page "What a rank holds": the memory of all stages as bars, with what `fsdp plan` says in numbers.
"use strict";
(() => {
    const { html, svg, grouped, humanBytes } = fsdp;

    const STAGES = [0, 1, 2, 3];
    const NAMES = ["0, DDP", "1", "2", "3, FSDP"];
    const GB = 1e9;

    /** Devices of `fsdp-core/src/hardware.rs`, with their memory. */
    const DEVICES = [
        ["H100", 80 * GB],
        ["H200", 141 * GB],
        ["A100", 80 * GB],
        ["4090", 24 * GB],
    ];

    /** What memory holds: field of the estimate, name, colour. */
    const PARTS = [
        ["parameter_bytes", "parameters", "parameters"],
        ["optimizer_bytes", "optimizer state", "optimizer"],
        ["gradient_bytes", "gradients", "gradients"],
        ["gathered_bytes", "gathered units", "gathered"],
        ["reducing_bytes", "being reduced", "reducing"],
        ["tier_bytes", "to and from the disk", "tier"],
        ["activation_bytes", "activations", "activations"],
    ];

    /** 1, 1.5, 2, 3, 5, 7 and 10 of each power of ten. */
    const counts = [];
    for (let power = 1e6; power <= 1e12; power *= 10) {
        for (const digit of [1, 1.5, 2, 3, 5, 7]) if (digit * power <= 2e12) counts.push(digit * power);
    }
    const powers = (most) => Array.from({ length: Math.log2(most) + 1 }, (_, at) => 2 ** at);

    const FIELDS = [
        {
            name: "parameters",
            kind: "number",
            label: "Parameters",
            value: 7e9,
            stops: counts,
            read: fsdp.parseCount,
            show: fsdp.count,
            least: 1000,
            most: 1e13,
            hint: "such as 7e9, 7B or 350M",
        },
        { name: "ranks", kind: "number", label: "Ranks", value: 8, stops: powers(4096), most: 65536 },
        {
            name: "stage",
            kind: "choice",
            label: "Stage",
            value: 0,
            options: STAGES.map((stage) => [stage, NAMES[stage]]),
        },
        {
            name: "precision",
            kind: "choice",
            label: "Precision",
            value: "f32",
            options: [
                ["f32", "float32"],
                ["bf16", "bf16, float32 masters"],
            ],
        },
        {
            name: "optimizer",
            kind: "select",
            label: "Optimizer",
            value: "adam",
            options: [
                ["adam", "Adam: two moments"],
                ["sgd-momentum", "SGD with momentum"],
                ["sgd", "plain SGD"],
            ],
        },
        {
            name: "offload",
            kind: "checks",
            label: "On a disk",
            value: [],
            options: [
                ["optimizer", "optimizer"],
                ["gradients", "gradients"],
                ["parameters", "parameters"],
            ],
        },
        {
            name: "units",
            kind: "number",
            label: "Units",
            value: 32,
            stops: [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128],
            most: 1000,
        },
        {
            name: "prefetch",
            kind: "number",
            label: "Prefetch depth",
            value: 1,
            stops: [0, 1, 2, 3, 4, 6, 8],
            least: 0,
            most: 16,
        },
        {
            name: "activations",
            kind: "number",
            label: "Activations, GB",
            value: 0,
            stops: [0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96],
            least: 0,
            most: 1000,
            hint: "0: not known",
        },
        {
            name: "device",
            kind: "select",
            label: "Device",
            value: "H100",
            options: DEVICES.map(([name, bytes]) => [name, `${name}, ${bytes / GB} GB`]),
        },
    ];

    /** What the model of memory is told. */
    const setting = (state) => ({
        parameters: state.parameters,
        units: Math.min(state.units, state.parameters),
        ranks: state.ranks,
        optimizer: state.optimizer,
        precision: state.precision,
        prefetch: state.prefetch,
        activations: state.activations > 0 ? state.activations * GB : null,
        offload: Object.fromEntries(state.offload.map((kind) => [kind, true])),
    });

    /** The run's file, and the command that says the same. */
    const commands = (state) => {
        const lines = [`stage = ${state.stage}`, `world_size = ${state.ranks}`];
        if (state.prefetch !== 1)
            lines.push("", "[prefetch]", `forward = ${state.prefetch}`, `backward = ${state.prefetch}`);
        if (state.precision !== "f32") lines.push("", "[precision]", `parameters = "${state.precision}"`);
        // Parameters that are whole on every rank do not go to a disk.
        const offload = state.offload.filter((kind) => kind !== "parameters" || state.stage === 3);
        if (offload.length > 0) {
            lines.push("", "[offload]", ...offload.map((kind) => `${kind} = "nvme"`), 'nvme_path = "/nvme/run1"');
        }
        const words = ["fsdp plan --config run.toml", `--params ${fsdp.count(state.parameters)}`];
        if (state.units !== 32) words.push(`--units ${state.units}`);
        if (state.optimizer !== "adam") words.push(`--optimizer ${state.optimizer}`);
        if (state.activations > 0) words.push(`--activations ${state.activations}GB`);
        if (state.device !== "H100") words.push(`--device ${state.device}`);
        return [`${lines.join("\n")}\n`, words.join(" ")];
    };

    /** `4P + 12P/N`: what of the state is whole, and what is cut; without what lies on a disk. */
    const formula = (of, stage) => {
        const bytes = fsdp.bytesPerParameter(of);
        const kinds = [
            { bytes: bytes.parameter, isCut: stage >= 3, isAway: of.offload.parameters && stage === 3 && of.ranks > 1 },
            { bytes: bytes.gradient, isCut: stage >= 2, isAway: of.offload.gradients },
            { bytes: bytes.optimizer, isCut: stage >= 1, isAway: of.offload.optimizer },
        ];
        const sum = (isCut) =>
            kinds.reduce((all, kind) => all + (kind.isCut === isCut && !kind.isAway ? kind.bytes : 0), 0);
        const terms = [
            [sum(false), "P"],
            [sum(true), "P/N"],
        ].filter(([bytes]) => bytes > 0);
        return terms.map(([bytes, of]) => `${bytes}${of}`).join(" + ") || "0";
    };

    const bars = (width, state, estimates, deviceBytes) => {
        const wide = width >= 520;
        const [left, height, gap, top] = [wide ? 76 : 0, 26, wide ? 14 : 34, wide ? 22 : 44];
        const sum = (estimate) => PARTS.reduce((all, [field]) => all + (estimate[field] ?? 0), 0);
        const most = Math.max(...estimates.map(sum), deviceBytes) * 1.02;
        const scale = (bytes) => (bytes / most) * (width - left);
        const rows = STAGES.map((stage) => {
            const estimate = estimates[stage];
            const y = top + stage * (height + gap);
            let x = left;
            const parts = PARTS.filter(([field]) => estimate[field] > 0).map(([field, name, colour]) => {
                const part = svg(
                    "rect",
                    { class: `part ${colour}`, x, y, width: scale(estimate[field]), height },
                    svg("title", {}, `${name}: ${humanBytes(estimate[field])}`),
                );
                x += scale(estimate[field]);
                return part;
            });
            const label = svg(
                "text",
                { x: 0, y: wide ? y + 18 : y - 9, class: stage === state.stage ? "chosen" : "" },
                `stage ${stage}`,
            );
            const peak = humanBytes(estimate.peak_bytes);
            const inside = x + 8 * peak.length + 14 > width;
            const told = wide
                ? svg(
                      "text",
                      {
                          x: inside ? x - 8 : x + 8,
                          y: y + 18,
                          "text-anchor": inside ? "end" : "start",
                          class: inside ? "on-part" : "",
                      },
                      peak,
                  )
                : svg("text", { x: width, y: y - 9, "text-anchor": "end" }, `peak ${peak}`);
            const frame =
                stage === state.stage
                    ? [
                          svg("rect", {
                              class: "frame",
                              x: left,
                              y: y - 3,
                              width: Math.max(x - left, 2),
                              height: height + 6,
                          }),
                      ]
                    : [];
            return svg("g", {}, ...parts, ...frame, label, told);
        });
        const bottom = top + 4 * height + 3 * gap + 8;
        const end = left + scale(deviceBytes);
        const device = [
            // On a narrow page labels stand between the bars.
            ...(wide
                ? [[14, bottom]]
                : STAGES.map((stage) => [top + stage * (height + gap) - 3, top + stage * (height + gap) + height + 3])
            ).map(([y1, y2]) => svg("line", { class: "device", x1: end, x2: end, y1, y2 })),
            svg(
                "text",
                { x: end < width / 3 ? end : end - 4, y: 10, "text-anchor": end < width / 3 ? "start" : "end" },
                `a device: ${humanBytes(deviceBytes)}`,
            ),
        ];
        const label = `Memory of a rank: ${STAGES.map((stage) => `stage ${stage} ${humanBytes(estimates[stage].peak_bytes)} at its peak`).join(", ")}; a device has ${humanBytes(deviceBytes)}.`;
        return fsdp.picture(width, bottom + 2, label, ...rows, ...device);
    };

    /** All stages in numbers. */
    const overview = (of, state, estimates, deviceBytes) => {
        const rows = STAGES.map((stage) => {
            const estimate = estimates[stage];
            const least = fsdp.minRanks(of, stage, deviceBytes);
            const fits = estimate.peak_bytes <= deviceBytes;
            return {
                attributes: stage === state.stage ? { class: "chosen" } : {},
                cells: [
                    `stage ${stage}`,
                    formula(of, stage),
                    fsdp.value(`${stage}.state_bytes`, estimate.state_bytes, humanBytes(estimate.state_bytes)),
                    fsdp.value(`${stage}.peak_bytes`, estimate.peak_bytes, humanBytes(estimate.peak_bytes)),
                    fsdp.value(`${stage}.fits`, fits, fits ? "yes" : "no"),
                    fsdp.value(`${stage}.min_ranks`, least, least === null ? "–" : grouped(least)),
                ],
            };
        });
        return fsdp.table("All stages", ["", "state, bytes", "state", "peak", "fits", "least ranks"], rows);
    };

    /** The parts of the stage that is chosen. */
    const details = (state, estimate) => {
        const rows = PARTS.map(([field, name, colour]) => {
            const bytes = estimate[field];
            const key = html("span", {}, html("i", { class: colour }), name);
            const value = (text) => fsdp.value(`${state.stage}.${field}`, bytes, text);
            return bytes === null ? [key, "?", value("not known")] : [key, humanBytes(bytes), value(grouped(bytes))];
        });
        rows.push({
            attributes: { class: "total" },
            cells: ["peak", humanBytes(estimate.peak_bytes), grouped(estimate.peak_bytes)],
        });
        return fsdp.table(`Stage ${state.stage} in detail`, ["", "", "bytes"], rows);
    };

    /** What one sees, as a sentence. */
    const summary = (state, estimates, deviceBytes) => {
        const estimate = estimates[state.stage];
        const least = STAGES.find((stage) => estimates[stage].peak_bytes <= deviceBytes);
        const fits = estimate.peak_bytes <= deviceBytes ? "fits" : "does not fit";
        const first =
            least === undefined
                ? "No stage fits."
                : least === 0
                  ? "All of it fits on every rank, so nothing has to be sharded."
                  : `The lowest stage that fits is ${least}.`;
        return `At stage ${state.stage}, a rank holds ${humanBytes(estimate.peak_bytes)} at its peak, which ${fits}. ${first}`;
    };

    fsdp.widget("memory", FIELDS, (state, width) => {
        const of = setting(state);
        const deviceBytes = DEVICES.find(([name]) => name === state.device)[1];
        const estimates = STAGES.map((stage) => fsdp.memory(of, stage));
        const held = PARTS.filter(([field]) => estimates.some((estimate) => estimate[field] > 0));
        const [toml, command] = commands(state);
        return {
            scene: [
                html("p", { class: "summary", role: "status" }, summary(state, estimates, deviceBytes)),
                bars(width, state, estimates, deviceBytes),
                fsdp.key(held.map(([, name, colour]) => [colour, name])),
            ],
            numbers: [
                html(
                    "div",
                    { class: "tables" },
                    overview(of, state, estimates, deviceBytes),
                    details(state, estimates[state.stage]),
                ),
                ...fsdp.commands("The same run as a file, and what the command says of it:", toml, command),
            ],
        };
    });
})();

// The page "Mesh and partition spec": which block of a tensor each rank of a mesh holds.
"use strict";
(() => {
    const { html, svg } = fsdp;

    const MOST_ELEMENTS = 512;
    const AXES = { "replicate, shard": ["replicate", "shard"], "shard, replicate": ["shard", "replicate"] };

    /** One to three sizes of a tensor that can be drawn. */
    const readShape = (text) => {
        const parts = text.split(/[,;x×\s]+/).filter((part) => part !== "");
        if (parts.length < 1 || parts.length > 3 || !parts.every((part) => /^[0-9]{1,3}$/.test(part))) return null;
        const shape = parts.map(Number);
        const len = shape.reduce((product, size) => product * size, 1);
        return shape.every((size) => size >= 1 && size <= 64) && len <= MOST_ELEMENTS ? shape : null;
    };

    const range = (from, to) => Array.from({ length: to - from + 1 }, (_, at) => from + at);

    const FIELDS = [
        {
            name: "shape",
            kind: "text",
            label: "Shape of the tensor",
            value: [7, 4],
            read: readShape,
            show: (shape) => shape.join(", "),
            hint: `one to three sizes; ${MOST_ELEMENTS} elements at most`,
        },
        {
            name: "cut",
            kind: "choice",
            label: "Cut",
            value: "0",
            options: [
                ["0", "dimension 0"],
                ["1", "dimension 1"],
                ["2", "dimension 2"],
                ["none", "not at all"],
            ],
        },
        { name: "shard", kind: "number", label: "Ranks along shard", value: 3, stops: range(1, 8), most: 8 },
        { name: "replicate", kind: "number", label: "Ranks along replicate", value: 1, stops: range(1, 4), most: 4 },
        {
            name: "order",
            kind: "choice",
            label: "Order of the axes",
            value: "replicate, shard",
            options: Object.keys(AXES).map((name) => [name, name]),
        },
        { name: "rank", kind: "number", label: "Look at rank", value: 0, stops: range(0, 31), least: 0, most: 31 },
        {
            name: "row",
            kind: "number",
            label: "Look at row",
            value: 5,
            stops: range(0, 63),
            least: 0,
            most: 63,
            hint: "of the dimension that is cut",
        },
    ];

    const meshOf = (state) => {
        const axes = AXES[state.order].map((axis) => [axis, state[axis]]);
        // An axis of one rank need not be written.
        const written = axes.filter(([axis]) => axis === "shard" || state.replicate > 1);
        return new fsdp.Mesh(written);
    };

    /** The spec as the errors of the project write it, `(None, shard)`. */
    const spec = (cut) => [...Array(cut).fill("None"), "shard"];

    /** Why a spec does not fit its parameter; in the words of `spec.rs`. */
    const refusal = (shape, cut) => {
        const dimensions = shape.length === 1 ? "dimension" : "dimensions";
        return (
            `\`weight\`: the spec (${spec(cut).join(", ")}) has ${cut + 1} entries, but the parameter's shape [${shape.join(", ")}] has ` +
            `${shape.length} ${dimensions}; write at most one entry for each dimension`
        );
    };

    const attribute = (state, shape) => {
        if (state.cut === "none") return "#[shard(replicate)]";
        const cut = Number(state.cut);
        const entries = shape.map((_, dim) => (dim === cut ? '"shard"' : "_"));
        return cut === 0
            ? "no attribute: dimension 0 is the default"
            : `#[shard(spec(${entries.slice(0, cut + 1).join(", ")}))]`;
    };

    const jax = (state, shape) =>
        `P(${shape.map((_, dim) => (String(dim) === state.cut ? '"shard"' : "None")).join(", ")})`;

    const list = (items) =>
        items.length < 2 ? items.join("") : `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`;

    /** The ranks as a grid, each in the colour of its block. */
    const ranksPicture = (width, mesh, blockOf, isHeld, chosen, choose) => {
        const [rows, columns] = mesh.axes.length === 2 ? mesh.axes.map(([, size]) => size) : [1, mesh.axes[0][1]];
        const left = mesh.axes.length === 2 ? 22 : 0;
        const cell = Math.min(96, (width - left) / columns);
        const height = Math.min(cell, 52);
        const children = [];
        for (const rank of range(0, mesh.worldSize - 1)) {
            const [x, y] = [left + (rank % columns) * cell, 22 + Math.floor(rank / columns) * height];
            const block = blockOf(rank);
            const group = svg(
                "g",
                { class: `rank block-${block % 8}${isHeld(rank) ? "" : " empty"}` },
                svg("rect", { x: x + 2, y: y + 2, width: cell - 4, height: height - 4, rx: 4 }),
                svg(
                    "text",
                    { x: x + cell / 2, y: y + height / 2 + (cell < 46 ? 5 : -1), "text-anchor": "middle" },
                    cell < 46 ? String(rank) : `rank ${rank}`,
                ),
            );
            if (cell >= 46)
                group.append(
                    svg(
                        "text",
                        { x: x + cell / 2, y: y + height / 2 + 14, "text-anchor": "middle" },
                        isHeld(rank) ? `block ${block}` : "nothing",
                    ),
                );
            if (rank === chosen)
                group.append(
                    svg("rect", { class: "frame", x: x + 1, y: y + 1, width: cell - 2, height: height - 2, rx: 5 }),
                );
            group.addEventListener("click", () => choose(rank));
            children.push(group);
        }
        const [slow, fast] = mesh.axes.length === 2 ? mesh.axes.map(([axis]) => axis) : [null, mesh.axes[0][0]];
        children.push(svg("text", { x: left + 2, y: 14 }, `${fast} →`));
        if (slow)
            children.push(
                svg(
                    "text",
                    {
                        x: 14,
                        y: 24 + (rows * height) / 2,
                        class: "turned",
                        transform: `rotate(-90 14 ${24 + (rows * height) / 2})`,
                        "text-anchor": "middle",
                    },
                    `← ${slow}`,
                ),
            );
        return fsdp.picture(
            Math.max(left + columns * cell, 80),
            24 + rows * height,
            `The mesh ${mesh}: ${mesh.worldSize} ranks, each coloured by its block.`,
            ...children,
        );
    };

    /** The tensor, each element in the colour of its block and with its number; slices of the first dimension side by side. */
    const tensorPicture = (width, layout, shape, isChosen, row, look) => {
        const [slices, rows, columns] =
            shape.length === 3 ? shape : [1, shape.length === 2 ? shape[0] : 1, shape.at(-1)];
        const perLine = Math.max(1, Math.min(slices, Math.floor((width + 16) / (columns * 24 + 16))));
        const fitting = Math.floor((width - (perLine - 1) * 16) / (perLine * columns));
        const cell = Math.max(6, Math.min(40, fitting, Math.max(10, Math.floor(600 / rows))));
        const [sliceWidth, sliceHeight] = [columns * cell + 16, rows * cell + 26];
        const children = [];
        for (let slice = 0; slice < slices; slice += 1) {
            const [left, top] = [
                (slice % perLine) * sliceWidth,
                Math.floor(slice / perLine) * sliceHeight + (shape.length === 3 ? 18 : 2),
            ];
            if (shape.length === 3) children.push(svg("text", { x: left, y: top - 5 }, `[${slice}, :, :]`));
            for (let i = 0; i < rows; i += 1) {
                for (let j = 0; j < columns; j += 1) {
                    const index = shape.length === 3 ? [slice, i, j] : shape.length === 2 ? [i, j] : [j];
                    const at = layout === null ? null : index[layout.dim];
                    const block = layout === null ? 0 : layout.blockOf(at);
                    const isLooked = at === row;
                    const group = svg(
                        "g",
                        {
                            class: `element block-${block % 8}${isChosen(block) ? " held" : ""}${isLooked ? " looked" : ""}`,
                            "data-block": block,
                        },
                        svg("rect", {
                            x: left + j * cell + 1,
                            y: top + i * cell + 1,
                            width: cell - 2,
                            height: cell - 2,
                            rx: 2,
                        }),
                    );
                    if (cell >= 14)
                        group.append(
                            svg(
                                "text",
                                {
                                    x: left + (j + 0.5) * cell,
                                    y: top + (i + 0.5) * cell + 4.5,
                                    "text-anchor": "middle",
                                },
                                String(block),
                            ),
                        );
                    if (at !== null) group.addEventListener("click", () => look(at));
                    children.push(group);
                }
            }
        }
        const lines = Math.ceil(slices / perLine);
        return fsdp.picture(
            perLine * sliceWidth - 16,
            lines * sliceHeight + 4,
            `The tensor of shape ${shape.join(" by ")}, each element with the number of its block.`,
            ...children,
        );
    };

    const rowsTold = ([from, to]) => (from === to ? "none" : to - from === 1 ? String(from) : `${from} to ${to - 1}`);

    fsdp.widget("mesh", FIELDS, (state, width) => {
        const { shape } = state;
        const mesh = meshOf(state);
        const cut = state.cut === "none" ? null : Number(state.cut);
        if (cut !== null && cut >= shape.length) {
            return {
                scene: [html("p", { class: "summary refused", role: "status" }, refusal(shape, cut))],
                numbers: [],
            };
        }
        const layout = cut === null ? null : new fsdp.ShardLayout(shape, cut, mesh.size("shard"));
        const rank = Math.min(state.rank, mesh.worldSize - 1);
        const row = layout === null ? null : Math.min(state.row, shape[cut] - 1);
        const blockOf = (of) => (layout === null ? 0 : mesh.coordinate("shard", of));
        const shapeOf = (of) => (layout === null ? shape : layout.shardShape(blockOf(of)));
        const lenOf = (of) => shapeOf(of).reduce((product, size) => product * size, 1);
        const holders = (block) => range(0, mesh.worldSize - 1).filter((of) => blockOf(of) === block);
        const widget = fsdp.widgets.mesh;

        const told =
            layout === null
                ? "Nothing is cut: every rank holds the whole tensor, and its gradients are all-reduced."
                : `Row ${row} of dimension ${cut} is in block ⌊${row} / ⌈${shape[cut]} / ${layout.numShards}⌉⌋ = ⌊${row} / ${layout.chunk}⌋ = ${layout.blockOf(row)}, which ${holders(layout.blockOf(row)).length === 1 ? "rank" : "ranks"} ${list(holders(layout.blockOf(row)))} ${holders(layout.blockOf(row)).length === 1 ? "holds" : "hold"}.`;
        const runsOf = (of) => (layout === null ? [[0, lenOf(of)]] : layout.runs(blockOf(of)));
        const inRanges = (num) => (num === 1 ? "one range" : `${num} ranges`);
        const ranges =
            lenOf(rank) === 0
                ? "holds nothing of it"
                : `holds ${lenOf(rank)} elements, in ${inRanges(runsOf(rank).length)} of the tensor's memory`;
        const [along, across] = ["shard", "replicate"].map((axis) => list(mesh.group(axis, rank)));
        const gathers =
            layout === null || mesh.size("shard") === 1
                ? "It has nothing to gather"
                : `Ranks ${along} gather from each other`;
        const adds = mesh.size("replicate") > 1 ? `; ranks ${across} hold copies, and add up their gradients` : "";

        const rows = range(0, mesh.worldSize - 1).map((of) => ({
            attributes: { class: of === rank ? "chosen" : "" },
            cells: [
                `rank ${of}`,
                fsdp.value(`${of}.coordinates`, mesh.coordinates(of).join(" "), mesh.coordinates(of).join(", ")),
                fsdp.value(
                    `${of}.rows`,
                    layout === null ? "all" : layout.rows(blockOf(of)).join(" "),
                    layout === null ? "all" : rowsTold(layout.rows(blockOf(of))),
                ),
                fsdp.value(`${of}.shape`, shapeOf(of).join(" "), shapeOf(of).join(" × ")),
                fsdp.value(`${of}.len`, lenOf(of), String(lenOf(of))),
                fsdp.value(`${of}.runs`, runsOf(of).length, String(runsOf(of).length)),
                fsdp.value(`${of}.shard`, mesh.group("shard", of).join(" "), mesh.group("shard", of).join(", ")),
                fsdp.value(
                    `${of}.replicate`,
                    mesh.group("replicate", of).join(" "),
                    mesh.group("replicate", of).join(", "),
                ),
            ],
        }));
        const axes = mesh.axes.map(([axis]) => axis).join(", ");
        const half = width >= 720 ? (width - 48) / 2 : width;
        return {
            scene: [
                html(
                    "p",
                    { class: "summary", role: "status" },
                    told,
                    html("br"),
                    `Rank ${rank} ${ranges}. ${gathers}${adds}.`,
                ),
                html(
                    "div",
                    { class: "pictures" },
                    html(
                        "figure",
                        {},
                        html("figcaption", {}, "The mesh"),
                        ranksPicture(
                            half,
                            mesh,
                            blockOf,
                            (of) => lenOf(of) > 0,
                            rank,
                            (of) => widget.take(`rank=${of}`),
                        ),
                    ),
                    html(
                        "figure",
                        {},
                        html("figcaption", {}, "The tensor, with the number of each element's block"),
                        tensorPicture(
                            half,
                            layout,
                            shape,
                            (block) => block === blockOf(rank),
                            row,
                            (at) => widget.take(`row=${at}`),
                        ),
                    ),
                ),
            ],
            numbers: [
                html(
                    "div",
                    { class: "tables" },
                    fsdp.table(
                        "What each rank holds",
                        [
                            "",
                            axes,
                            cut === null ? "rows" : `rows of dimension ${cut}`,
                            "shape",
                            "elements",
                            "ranges",
                            "gathers with",
                            "copies on",
                        ],
                        rows,
                    ),
                    fsdp.table(
                        "How to write it",
                        null,
                        [
                            ["here, the mesh", html("code", {}, `mesh = ${mesh}`)],
                            [
                                "here, the field",
                                cut === 0 ? attribute(state, shape) : html("code", {}, attribute(state, shape)),
                            ],
                            ["JAX, on a mesh of these axes", html("code", {}, jax(state, shape))],
                            ["FSDP2", html("code", {}, cut === null ? "no counterpart" : `Shard(${cut})`)],
                        ].map((cells) => ({ cells, attributes: { class: "written" } })),
                    ),
                ),
            ],
        };
    });
})();

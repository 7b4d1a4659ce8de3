// What the interactive pages are made of: elements, controls with a label each, and the bond between them and a picture.
"use strict";
globalThis.fsdp ??= {};
(() => {
    const SVG = "http://www.w3.org/2000/svg";

    const fill = (element, attributes, children) => {
        for (const [name, value] of Object.entries(attributes)) {
            if (value === true) element.setAttribute(name, "");
            else if (value !== false && value !== undefined && value !== null) element.setAttribute(name, value);
        }
        element.append(...children);
        return element;
    };

    /** An element of HTML. */
    fsdp.html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

    /** An element of SVG. */
    fsdp.svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

    /** A picture of so many pixels, with a text for those who do not see it. Where its place is narrower, it shrinks. */
    fsdp.picture = (width, height, label, ...children) =>
        fsdp.svg(
            "svg",
            { viewBox: `0 0 ${width} ${height}`, style: `width: ${width}px`, role: "img", "aria-label": label },
            ...children,
        );

    /** The names of colours. `entries`: `[class, name]`. */
    fsdp.key = (entries) =>
        fsdp.html(
            "ul",
            { class: "key" },
            ...entries.map(([colour, name]) => fsdp.html("li", {}, fsdp.html("i", { class: colour }), name)),
        );

    /** A table, with a head unless that is `null`, and rows of cells; the first cell of a row is its head. */
    fsdp.table = (caption, head, rows) => {
        const row = ([first, ...cells], attributes = {}) =>
            fsdp.html(
                "tr",
                attributes,
                fsdp.html("th", { scope: "row" }, first),
                ...cells.map((cell) => fsdp.html("td", {}, cell)),
            );
        const heads = (head ?? []).map((cell) =>
            cell === "" ? fsdp.html("td", {}) : fsdp.html("th", { scope: "col" }, cell),
        );
        const table = fsdp.html("table", {}, fsdp.html("caption", {}, caption));
        if (head !== null) table.append(fsdp.html("thead", {}, fsdp.html("tr", {}, ...heads)));
        table.append(fsdp.html("tbody", {}, ...rows.map((cells) => row(cells.cells ?? cells, cells.attributes))));
        // Where it is wider than its place it scrolls, which needs the focus.
        return fsdp.html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, table);
    };

    /** The file of a run, and a command, which is broken between its words only. */
    fsdp.commands = (text, toml, command) => [
        fsdp.html("p", { class: "before" }, text),
        fsdp.html(
            "div",
            { class: "commands" },
            fsdp.html("pre", { "data-file": "run.toml" }, `# run.toml\n${toml}`),
            fsdp.html(
                "pre",
                { "data-command": "" },
                ...command.split(" ").flatMap((word) => [fsdp.html("span", {}, word), " "]),
            ),
        ),
    ];

    /** The number that a test reads, beside the text that people read. */
    fsdp.value = (name, number, text) => fsdp.html("data", { "data-name": name, value: String(number) }, text);

    let numIds = 0;
    const newId = () => `fsdp-${(numIds += 1)}`;

    /** Kinds of controls. Each makes `{ element, set, tell }`: `set` shows a value, `tell` is called with a new one. */
    const KINDS = {
        /** A whole number: to be typed, or on a slider over `stops`. `read` and `show` translate, by default as they are. */
        number({ label, stops, hint, read = readWhole, show = String, least = 1, most = Infinity }, tell) {
            const [id, help] = [newId(), newId()];
            const text = fsdp.html("input", {
                id,
                type: "text",
                inputmode: "decimal",
                autocomplete: "off",
                spellcheck: "false",
                "aria-describedby": help,
            });
            const slider = fsdp.html("input", {
                type: "range",
                min: 0,
                max: stops.length - 1,
                "aria-label": `${label}, slider`,
            });
            const described = fsdp.html("small", { id: help }, hint ?? "");
            const refused = (is) => {
                text.setAttribute("aria-invalid", String(is));
                described.textContent = is ? `Write a number from ${show(least)} to ${show(most)}.` : (hint ?? "");
            };
            text.addEventListener("input", () => {
                const value = read(text.value);
                const isGood = value !== null && value >= least && value <= most;
                refused(!isGood);
                if (isGood) {
                    place(value);
                    tell(value);
                }
            });
            slider.addEventListener("input", () => {
                const value = stops[Number(slider.value)];
                set(value);
                tell(value);
            });
            const place = (value) => {
                const distance = (stop) => Math.abs(Math.log((stop + 1e-9) / (value + 1e-9)));
                slider.value = stops.reduce(
                    (best, stop, at) => (distance(stop) < distance(stops[best]) ? at : best),
                    0,
                );
                slider.setAttribute("aria-valuetext", show(value));
            };
            const set = (value) => {
                refused(false);
                text.value = show(value);
                place(value);
            };
            return {
                element: fsdp.html(
                    "div",
                    { class: "number" },
                    fsdp.html("label", { for: id }, label),
                    text,
                    slider,
                    described,
                ),
                set,
            };
        },

        /** A line of text that `read` understands, or answers with `null`; `hint` says what it should be. */
        text({ label, hint, read, show }, tell) {
            const [id, help] = [newId(), newId()];
            const text = fsdp.html("input", {
                id,
                type: "text",
                autocomplete: "off",
                spellcheck: "false",
                "aria-describedby": help,
            });
            text.addEventListener("input", () => {
                const value = read(text.value);
                text.setAttribute("aria-invalid", String(value === null));
                if (value !== null) tell(value);
            });
            const set = (value) => {
                text.setAttribute("aria-invalid", "false");
                text.value = show(value);
            };
            return {
                element: fsdp.html(
                    "div",
                    { class: "number" },
                    fsdp.html("label", { for: id }, label),
                    text,
                    fsdp.html("small", { id: help }, hint),
                ),
                set,
            };
        },

        /** One of few, all of them in sight. `options`: `[value, name]`. */
        choice({ label, options }, tell) {
            const group = newId();
            const radios = options.map(([value, name]) => {
                const radio = fsdp.html("input", { type: "radio", name: group, value });
                radio.addEventListener("change", () => tell(value));
                return [value, radio, fsdp.html("label", {}, radio, fsdp.html("span", {}, name))];
            });
            const element = fsdp.html(
                "fieldset",
                {},
                fsdp.html("legend", {}, label),
                fsdp.html("div", { class: "options" }, ...radios.map(([, , of]) => of)),
            );
            return { element, set: (value) => radios.forEach(([of, radio]) => (radio.checked = of === value)) };
        },

        /** One of many. */
        select({ label, options }, tell) {
            const id = newId();
            const select = fsdp.html(
                "select",
                { id },
                ...options.map(([value, name]) => fsdp.html("option", { value }, name)),
            );
            select.addEventListener("change", () => tell(options[select.selectedIndex][0]));
            const set = (value) => (select.selectedIndex = options.findIndex(([of]) => of === value));
            return {
                element: fsdp.html("div", { class: "select" }, fsdp.html("label", { for: id }, label), select),
                set,
            };
        },

        /** Any of few: the value is the list of those that are on. */
        checks({ label, options }, tell) {
            const boxes = options.map(([value, name]) => {
                const box = fsdp.html("input", { type: "checkbox", value });
                box.addEventListener("change", () => tell(boxes.filter(([, one]) => one.checked).map(([of]) => of)));
                return [value, box, fsdp.html("label", {}, box, fsdp.html("span", {}, name))];
            });
            const element = fsdp.html(
                "fieldset",
                {},
                fsdp.html("legend", {}, label),
                fsdp.html("div", { class: "options" }, ...boxes.map(([, , of]) => of)),
            );
            return { element, set: (value) => boxes.forEach(([of, box]) => (box.checked = value.includes(of))) };
        },
    };

    const readWhole = (text) => (/^\s*[0-9]{1,15}\s*$/.test(text) ? Number(text) : null);

    /** How a value is written in an address, and read from there; `undefined` where it is none that the control can have. */
    const written = (value) => (Array.isArray(value) ? value.join(",") : String(value));
    const readBack = (field, text) => {
        if (field.kind === "checks") {
            const values = text.split(",").filter((one) => one !== "");
            return values.every((one) => field.options.some(([of]) => of === one)) ? values : undefined;
        }
        if (field.options) return field.options.find(([of]) => String(of) === text)?.[0];
        const value = (field.read ?? readWhole)(text);
        if (field.kind === "text") return value ?? undefined;
        return value !== null && value >= (field.least ?? 1) && value <= (field.most ?? Infinity) ? value : undefined;
    };

    /**
     * Fills the element `fsdp-NAME`, if the page has it: a picture, the controls under it, and numbers. `fields` are
     * controls, each with `name`, `kind`, `label` and `value`. Whenever one of them changes, `draw(state, width)` makes the
     * elements of `scene` and of `numbers` anew, for so many pixels.
     *
     * Buttons of the page with `data-fsdp="NAME"` set what their `data-set` says, as does the page's own address; the first
     * of an item of a list begins anew.
     */
    fsdp.widget = (name, fields, draw) => {
        const root = document.getElementById(`fsdp-${name}`);
        if (root === null || root.dataset.drawn) return;
        const state = Object.fromEntries(fields.map((field) => [field.name, field.value]));
        const [scene, numbers] = ["scene", "numbers"].map((part) => fsdp.html("div", { class: part }));
        const settings = fsdp.html("p", { class: "settings" });
        let width = 0;
        const redraw = () => {
            const told = fields.map(
                (field) =>
                    `${field.label}: ${field.options ? named(field, state[field.name]) : (field.show ?? String)(state[field.name])}`,
            );
            settings.textContent = told.join(" · ");
            width = root.clientWidth;
            const drawn = draw(state, Math.max(280, Math.min(960, Math.floor(width) || 720)));
            scene.replaceChildren(...drawn.scene);
            numbers.replaceChildren(...drawn.numbers);
        };
        const controls = fields.map((field) => {
            const control = KINDS[field.kind](field, (value) => {
                state[field.name] = value;
                redraw();
            });
            return { field, ...control };
        });
        const take = (text, isAnew = false) => {
            if (isAnew) for (const field of fields) state[field.name] = field.value;
            for (const [key, value] of new URLSearchParams(text)) {
                const field = fields.find((field) => field.name === key);
                const known = field && readBack(field, value);
                if (known !== undefined) state[key] = known;
            }
            for (const { field, set } of controls) set(state[field.name]);
            redraw();
        };
        const form = fsdp.html(
            "form",
            { class: "controls", "aria-label": `${root.getAttribute("aria-label")}: settings` },
            ...controls.map(({ element }) => element),
        );
        form.addEventListener("submit", (event) => event.preventDefault());
        root.replaceChildren(settings, scene, form, numbers);
        // The book turns its pages with the arrow keys, which here move sliders.
        root.addEventListener("keydown", (event) => event.stopPropagation());
        document.addEventListener("click", (event) => {
            const button = event.target.closest?.(`button[data-fsdp="${name}"]`);
            const isFirst = button?.closest("li")?.querySelector("button") === button;
            if (button) take(button.dataset.set, isFirst);
        });
        fsdp.widgets[name] = {
            take,
            get: () => fields.map((field) => `${field.name}=${written(state[field.name])}`).join("&"),
        };
        take(location.search);
        lesson(name);
        // Pictures are drawn in pixels of their place, so that text in them stays as large.
        new ResizeObserver(() => {
            if (root.clientWidth !== width && root.clientWidth > 0) redraw();
        }).observe(root);
        root.dataset.drawn = "true";
        performance.mark("fsdp-drawn");
    };

    /** By name, what the widgets of the page show: `get` tells it as `take` sets it. */
    fsdp.widgets = {};

    /** Shows the list of what to try one by one, beside the picture; on paper it is a list. */
    const lesson = (name) => {
        const place = document.querySelector(`.fsdp-lesson[data-fsdp="${name}"]`);
        if (place === null) return;
        const items = [...place.querySelectorAll("li")];
        const count = fsdp.html("span", {});
        const [back, next] = [
            ["Back", -1],
            ["Next", 1],
        ].map(([text, by]) => {
            const button = fsdp.html("button", { type: "button" }, text);
            button.addEventListener("click", () => {
                show(at + by);
                items[at].querySelector("button")?.click();
            });
            return button;
        });
        let at = 0;
        const show = (to) => {
            at = to;
            items.forEach((item, index) => item.classList.toggle("current", index === at));
            count.textContent = `Try ${at + 1} of ${items.length}`;
            // A button that loses its sense while it has the focus would lose that too.
            for (const [button, isEnd] of [
                [back, at === 0],
                [next, at === items.length - 1],
            ])
                button.setAttribute("aria-disabled", String(isEnd));
        };
        for (const button of [back, next]) {
            button.addEventListener(
                "click",
                (event) => button.getAttribute("aria-disabled") === "true" && event.stopImmediatePropagation(),
                true,
            );
        }
        const turn = fsdp.html("div", { class: "turn" }, count, back, next);
        // A button that has the focus turns the lesson, not the book.
        place.addEventListener("keydown", (event) => event.stopPropagation());
        place.querySelector("ul").setAttribute("aria-live", "polite");
        place.prepend(turn);
        place.classList.add("stepped");
        show(0);
    };

    const named = (field, value) => {
        const name = (one) => field.options.find(([of]) => of === one)?.[1];
        return Array.isArray(value) ? value.map(name).join(", ") || "nothing" : name(value);
    };
})();

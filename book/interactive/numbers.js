// Numbers as the command `fsdp` reads and prints them.
"use strict";
globalThis.fsdp ??= {};
(() => {
    /** `7e9`, `7.5B` or `350M` as a whole number of at least 1; `null` for anything else. */
    fsdp.parseCount = (text) => {
        const found = /^([0-9_]*\.?[0-9_]*(?:e[+-]?[0-9]+)?)([kmbt]?)$/i.exec(text.trim());
        if (found === null || !/[0-9]/.test(found[1])) return null;
        const factors = { "": 1, k: 1e3, m: 1e6, b: 1e9, t: 1e12 };
        const value = Number(found[1].replaceAll("_", "")) * factors[found[2].toLowerCase()];
        return Number.isInteger(value) && value >= 1 && value <= 9e15 ? value : null;
    };

    /** A count as `parseCount` reads it, and as short as it can be: `7B`, `1.5M`, `12345`. */
    fsdp.count = (value) => {
        for (const [factor, letter] of [
            [1e12, "T"],
            [1e9, "B"],
            [1e6, "M"],
            [1e3, "K"],
        ]) {
            const text = `${value / factor}${letter}`;
            if (value >= factor && text.length <= 6 && fsdp.parseCount(text) === value) return text;
        }
        return String(value);
    };

    /** `1234567` as `1,234,567`. */
    fsdp.grouped = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, ",");

    /**
     * So many decimals, as Rust prints them: what lies in the middle goes to the even digit, where `toFixed` goes up.
     */
    fsdp.fixed = (value, digits) => {
        const rounded = value.toFixed(digits);
        const exact = value.toFixed(Math.min(100, digits + 60));
        const point = exact.indexOf(".") + 1 + digits;
        const isMiddle = /^50*$/.test(exact.slice(point));
        const below = exact.slice(0, digits === 0 ? point - 1 : point);
        return isMiddle && "02468".includes(below.at(-1)) ? below : rounded;
    };

    /** Bytes in binary units with one decimal: `13.0 GiB`; below 1 KiB as they are. */
    fsdp.humanBytes = (bytes) => {
        let [value, unit] = [bytes, "B"];
        for (const larger of ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]) {
            // What would round to 1024.0 is 1.0 of the next unit.
            if (value < (unit === "B" ? 1024 : 1023.95)) break;
            [value, unit] = [value / 1024, larger];
        }
        return unit === "B" ? `${bytes} B` : `${fsdp.fixed(value, 1)} ${unit}`;
    };

    /** Seconds in the unit that fits. */
    fsdp.seconds = (seconds) => {
        if (seconds >= 100) return `${fsdp.fixed(seconds, 0)} s`;
        if (seconds >= 1) return `${fsdp.fixed(seconds, 2)} s`;
        if (seconds >= 1e-3) return `${fsdp.fixed(seconds * 1e3, 2)} ms`;
        return seconds > 0 ? `${fsdp.fixed(seconds * 1e6, 2)} µs` : "0";
    };

    /** A quotient of whole numbers below 2^53, rounded up. */
    fsdp.divCeil = (number, by) => Math.ceil(number / by);
})();

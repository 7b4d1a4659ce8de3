// The order in which units are gathered, freed, reduced and stepped: `fsdp-core/src/schedule.rs`, without tiers.
"use strict";
globalThis.fsdp ??= {};
(() => {
    /**
     * The state machine. It is told what the model does, and answers with a list of `[action, unit]`: `gather`,
     * `waitGather`, `free`, `reduce`, `waitReduce`, `step`, `publish`, `waitPublish`.
     *
     * All units are alike here: trainable, none is kept, and all or none are gathered on use.
     */
    fsdp.Schedule = class {
        constructor({ stage, units, depth, gatheredOnUse }) {
            Object.assign(this, { stage, depth, gatheredOnUse });
            this.units = Array.from({ length: units }, () => ({ state: "sharded", pending: 0, ready: false }));
            this.pass = { kind: "idle", cursor: 0 };
            this.current = null;
            this.forwardOrder = [];
            this.backwardOrder = [];
            this.recording = [];
            this.reduceOrder = [];
            this.nextReduce = 0;
            this.reduceInFlight = null;
            this.reducesPending = [];
            this.firstUses = [];
            this.expectedUses = [];
        }

        /** A unit is needed in forward. */
        forward(unit) {
            if (this.pass.kind !== "forward") {
                this.recording = [];
                this.firstUses = [];
                this.current = null;
                this.pass = { kind: "forward", cursor: 0 };
            }
            if (this.current !== unit) this.recording.push(unit);
            if (!this.firstUses.includes(unit)) this.firstUses.push(unit);
            const cursor = findNext(this.forwardOrder, this.pass.cursor, unit);
            this.pass.cursor = cursor;
            return this.#demand(unit, this.#window(this.forwardOrder, cursor, unit));
        }

        /** One more gradient of a unit is to come. */
        gradientExpected(unit) {
            this.units[unit].pending += 1;
        }

        /** Fixes the order of reductions, and what the next forward starts with, once. */
        agree() {
            if (this.reduceOrder.length > 0) return;
            this.reduceOrder = this.firstUses.toReversed();
            this.expectedUses = [...this.firstUses];
        }

        beginBackward() {
            if (this.recording.length > 0 && !equal(this.recording, this.forwardOrder)) {
                this.forwardOrder = [...this.recording];
                this.backwardOrder = this.forwardOrder.toReversed();
            }
            this.recording = [];
            this.nextReduce = 0;
            this.units.forEach((unit) => (unit.ready = false));
            this.current = null;
            this.pass = { kind: "backward", cursor: 0 };
        }

        /** A unit is needed in backward. */
        backward(unit) {
            const cursor = findNext(this.backwardOrder, this.pass.cursor, unit);
            this.pass.cursor = cursor;
            if (this.recording.at(-1) !== unit) this.recording.push(unit);
            return this.#demand(unit, this.#window(this.backwardOrder, cursor, unit));
        }

        /** A gradient of a unit is there; the last one frees the unit, and its reduction starts when it is its turn. */
        gradient(unit) {
            const actions = [];
            const of = this.units[unit];
            of.pending -= 1;
            if (of.pending > 0) return actions;
            of.ready = true;
            this.#free(unit, actions);
            while (this.stage !== 1 && this.nextReduce < this.reduceOrder.length) {
                const next = this.reduceOrder[this.nextReduce];
                if (!this.units[next].ready) break;
                this.#reduce(next, true, actions);
            }
            return actions;
        }

        endBackward() {
            const actions = [];
            this.units.forEach((_, unit) => this.#free(unit, actions));
            actions.push(...this.reduceRest());
            if (this.recording.length > 0) this.backwardOrder = this.recording;
            this.recording = [];
            this.pass = { kind: "idle", cursor: 0 };
            this.current = null;
            return actions;
        }

        /** Starts all reductions that backward has not started. */
        reduceRest() {
            const actions = [];
            while (this.nextReduce < this.reduceOrder.length) {
                this.#reduce(this.reduceOrder[this.nextReduce], false, actions);
            }
            this.units.forEach((unit) => (unit.ready = false));
            return actions;
        }

        /** Waits for the reductions that are under way: before a norm over all gradients. */
        finishReduces() {
            this.reduceInFlight = null;
            return this.reducesPending.splice(0).map((unit) => ["waitReduce", unit]);
        }

        /** The optimizer's step over all units. */
        step() {
            const actions = [];
            this.units.forEach((_, unit) => this.#free(unit, actions));
            const first = this.#firstUnits();
            const order = [...this.reduceOrder];
            if (this.reducesPending.length === 0) {
                const place = (unit) => (first.includes(unit) ? first.indexOf(unit) : Infinity);
                order.sort((one, two) => (place(one) === place(two) ? 0 : place(one) - place(two)));
            }
            const publishes = this.stage === 1 || this.stage === 2;
            let published = null;
            for (const unit of order) {
                if (this.reducesPending.includes(unit)) actions.push(["waitReduce", unit]);
                actions.push(["step", unit]);
                this.#gatherAhead(
                    first.filter((other) => other === unit),
                    actions,
                );
                if (publishes) {
                    actions.push(["publish", unit]);
                    // At most two units are published at once.
                    if (published !== null) actions.push(["waitPublish", published]);
                    published = unit;
                }
            }
            if (published !== null) actions.push(["waitPublish", published]);
            this.reducesPending = [];
            this.reduceInFlight = null;
            this.firstUses = [];
            this.recording = [];
            this.current = null;
            return actions;
        }

        /** What forward is going to have gathered when it uses its first unit. None without prefetching. */
        #firstUnits() {
            if (this.expectedUses.length === 0 || this.depth === 0) return [];
            return this.#window(this.expectedUses, 0, this.expectedUses[0]);
        }

        /** A unit and those used after it, as deep as the prefetch. */
        #window(order, cursor, unit) {
            if (order[cursor] !== unit || !this.gatheredOnUse) return [unit];
            const later = order.slice(cursor + 1).filter((next) => next !== unit);
            return [unit, ...new Set(later)].slice(0, this.depth + 1);
        }

        /** Makes a unit present and the rest of the window under way; frees what is not needed any more. */
        #demand(unit, window) {
            const { state } = this.units[unit];
            if (this.current === unit && (!this.gatheredOnUse || state === "gathered")) return [];
            this.current = unit;
            const actions = [];
            if (this.gatheredOnUse) {
                const inBackward = this.pass.kind === "backward";
                this.units.forEach((of, other) => {
                    if (!window.includes(other) && !(inBackward && of.pending > 0)) this.#free(other, actions);
                });
            }
            this.#gatherAhead(window, actions);
            if (this.units[unit].state === "gathering") {
                this.units[unit].state = "gathered";
                actions.push(["waitGather", unit]);
            }
            return actions;
        }

        #gatherAhead(units, actions) {
            for (const unit of units) {
                if (this.gatheredOnUse && this.units[unit].state === "sharded") {
                    this.units[unit].state = "gathering";
                    actions.push(["gather", unit]);
                }
            }
        }

        #free(unit, actions) {
            if (this.units[unit].state !== "sharded") {
                this.units[unit].state = "sharded";
                actions.push(["free", unit]);
            }
        }

        /** Starts a reduction. In backward the one before it must be done, so that at most two whole gradients exist. */
        #reduce(unit, inBackward, actions) {
            const previous = inBackward ? this.reduceInFlight : null;
            this.reduceInFlight = unit;
            for (const waited of [previous, unit]) {
                const at = this.reducesPending.indexOf(waited);
                if (at >= 0) {
                    this.reducesPending.splice(at, 1);
                    actions.push(["waitReduce", waited]);
                }
            }
            actions.push(["reduce", unit]);
            this.reducesPending.push(unit);
            this.nextReduce += 1;
        }
    };

    const equal = (one, two) => one.length === two.length && one.every((unit, at) => unit === two[at]);

    /** The position of `unit` at or after `cursor`, else from the start, else `cursor`. */
    const findNext = (order, cursor, unit) => {
        const after = order.indexOf(unit, cursor);
        const found = after >= 0 ? after : order.indexOf(unit);
        return found >= 0 ? found : cursor;
    };
})();

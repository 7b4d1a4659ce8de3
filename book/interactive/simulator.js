// A simulated step: `program.rs`, `job.rs` and `run.rs` of `fsdp-core/src/simulate`, for equal units on one axis of ranks.
"use strict";
globalThis.fsdp ??= {};
(() => {
    const { divCeil } = fsdp;

    /** An H100 in float32, of whose arithmetic 40% is reached, with Adam: what `fsdp simulate` takes by default. */
    const FLOPS_PER_S = 0.4 * 66.9e12;
    const MEMORY_BYTES_PER_S = 3.35e12;
    const ELEMENT_BYTES = 4;
    /** The optimizer reads and writes two moments and the parameter, and reads the gradient. */
    const OPTIMIZER_BYTES = 8 * 2 + 12;

    /** What a rank does in a step, when the schedule knows all orders: `[what, unit]`. */
    fsdp.program = ({ stage, units, prefetch, ranks }) => {
        const gatheredOnUse = stage === 3 && ranks > 1;
        const schedule = new fsdp.Schedule({ stage, units, depth: prefetch, gatheredOnUse });
        let instructions = [];
        for (let step = 0; step < 3; step += 1) instructions = oneStep(schedule, units);
        return instructions;
    };

    const oneStep = (schedule, units) => {
        const instructions = [["beginForward"]];
        for (let unit = 0; unit < units; unit += 1) {
            instructions.push(...schedule.forward(unit), ["forward", unit]);
        }
        for (let unit = 0; unit < units; unit += 1) schedule.gradientExpected(unit);
        schedule.agree();
        schedule.beginBackward();
        instructions.push(["beginBackward"]);
        for (let unit = units - 1; unit >= 0; unit -= 1) {
            instructions.push(...schedule.backward(unit), ["backward", unit], ...schedule.gradient(unit));
        }
        instructions.push(...schedule.endBackward(), ["beginStep"], ...schedule.reduceRest());
        instructions.push(...schedule.finishReduces(), ["norm"], ...schedule.step());
        return instructions;
    };

    /** What N−1 messages of a ring take, and send. `T = α + β·S` for each; they fill the link without α. */
    const ring = ({ ranks, alpha, beta }, shardLen, elementBytes) => {
        const messages = ranks - 1;
        const filled = ranks <= 1 ? 0 : beta * (messages * elementBytes * shardLen);
        const seconds = ranks <= 1 ? 0 : alpha * messages + filled;
        return { seconds, filled, messages, sent: messages * shardLen * elementBytes };
    };

    /** A reduce-scatter, then an all-gather. */
    const allReduce = (link, fullLen) => {
        const bytes = ring(link, divCeil(ELEMENT_BYTES * fullLen, link.ranks), 1);
        const elements = ring(link, divCeil(fullLen, link.ranks), ELEMENT_BYTES);
        const { messages, sent } = elements;
        return { seconds: 2 * bytes.seconds, filled: 2 * bytes.filled, messages: 2 * messages, sent: 2 * sent };
    };

    /** What each unit costs: seconds of computation, and its collectives. */
    fsdp.work = (setting) => {
        const { stage, ranks } = setting;
        const link = { ranks, alpha: setting.alphaUs * 1e-6, beta: 1e-9 / setting.bandwidth };
        return fsdp.unitLens(setting.parameters, setting.units).map((len) => {
            const shardLen = divCeil(len, ranks);
            const forward = 2 * len * setting.tokens * (1 / FLOPS_PER_S);
            const shard = ring(link, shardLen, ELEMENT_BYTES);
            return {
                bytes: ELEMENT_BYTES * len,
                shardBytes: ELEMENT_BYTES * shardLen,
                forward,
                backward: forward * 2,
                step: (OPTIMIZER_BYTES * (stage >= 1 ? shardLen : len)) / MEMORY_BYTES_PER_S,
                gather: shard,
                publish: shard,
                reduce: stage === 0 ? allReduce(link, len) : shard,
            };
        });
    };

    /**
     * One step in the steady state. `setting`: `stage`, `parameters`, `units`, `ranks`, `prefetch`, `alphaUs`,
     * `bandwidth` (GB/s, the inverse of β), `tokens` of a rank, and `slower`: the factor of the last rank's times.
     *
     * The result has the fields of `fsdp simulate --json`; the `spans` of each kind of rank, in seconds from the step's
     * start; and its `events`: when which unit's `parameters` or `gradients` came into which state.
     */
    fsdp.simulate = (setting) => {
        const program = fsdp.program(setting);
        const run = new Run(setting);
        run.step(program);
        run.beginMeasuring();
        run.step(program);
        return run.report(program);
    };

    /** The stream of each collective, and what is waited for with it. */
    const STREAMS = { gather: "gather", publish: "gather", reduce: "reduce" };
    const WAITED = { waitGather: "gather", waitPublish: "publish", waitReduce: "reduce" };

    /** The other stream, what is given to it, and the state of a unit that comes of it. */
    const BESIDE = {
        gather: { other: "reduce", given: ["reduce"], of: "gradients", state: "reduced" },
        reduce: { other: "gather", given: ["gather", "publish"], of: "parameters", state: "whole" },
    };

    class Run {
        constructor(setting) {
            this.setting = setting;
            this.work = fsdp.work(setting);
            // Ranks that cannot be told apart are one; here all of them, or the last and the others.
            const alone = setting.slower === 1 || setting.ranks === 1;
            this.kinds = alone
                ? [{ rank: 0, count: setting.ranks, slowdown: setting.slower }]
                : [
                      { rank: 0, count: setting.ranks - 1, slowdown: 1 },
                      { rank: setting.ranks - 1, count: 1, slowdown: setting.slower },
                  ];
            this.clocks = this.kinds.map(() => ({
                now: 0,
                free: { gather: 0, reduce: 0 },
                uses: { gather: { until: 0, filled: 0 }, reduce: { until: 0, filled: 0 } },
                arrived: { gather: [], publish: [], reduce: [] },
                computed: 0,
                waited: 0,
                communicated: 0,
            }));
            Object.assign(this, { spans: [], events: [], messages: 0, sent: 0, updates: 0, origin: 0 });
        }

        step(program) {
            for (const [what, unit] of program) {
                if (["forward", "backward", "step"].includes(what)) this.#compute(what, unit);
                else if (what === "norm") this.#norm();
                else if (what in STREAMS) this.#collect(what, unit);
                else if (what in WAITED) this.#wait(WAITED[what], unit);
                else if (what === "free") this.#happens("parameters", unit, "block");
            }
        }

        beginMeasuring() {
            this.origin = this.#end();
            for (const clock of this.clocks) Object.assign(clock, { computed: 0, waited: 0, communicated: 0 });
            Object.assign(this, { messages: 0, sent: 0 });
        }

        report(program) {
            const { origin, setting } = this;
            const mean = (of) =>
                this.clocks.reduce((sum, clock, at) => sum + of(clock) * this.kinds[at].count, 0) / setting.ranks;
            const [exposed_s, communication_s] = [mean((clock) => clock.waited), mean((clock) => clock.communicated)];
            const shifted = (one) => ({ ...one, start: one.start - origin, end: one.end - origin });
            return {
                stage: setting.stage,
                ranks: setting.ranks,
                step_s: this.#end() - origin,
                compute_s: mean((clock) => clock.computed),
                exposed_s,
                communication_s,
                overlap: communication_s > 0 ? 1 - Math.min(exposed_s / communication_s, 1) : null,
                sent_bytes: this.sent,
                messages: this.messages,
                peak_gathered_bytes: peakGathered(program, this.work),
                classes: this.kinds.length,
                updates: this.updates,
                kinds: this.kinds,
                spans: this.spans.map(shifted).filter((span) => span.end > 0),
                events: this.events.map((event) => ({ ...event, at: event.at - origin })),
            };
        }

        #end() {
            return this.clocks.reduce((end, clock) => Math.max(end, clock.now), 0);
        }

        #span(kind, row, what, unit, start, end) {
            this.spans.push({ kind, row, what, unit, start, end });
        }

        #happens(of, unit, state, at = (clock) => clock.now) {
            this.clocks.forEach((clock, kind) => this.events.push({ kind, of, unit, state, at: at(clock) }));
        }

        #compute(what, unit) {
            if (what === "backward") this.#happens("gradients", unit, "whole");
            this.clocks.forEach((clock, kind) => {
                const seconds = this.work[unit][what] * this.kinds[kind].slowdown;
                const start = clock.now;
                clock.now += seconds;
                clock.computed += seconds;
                this.#span(kind, "compute", what, unit, start, clock.now);
            });
            if (what === "step") this.#happens("gradients", unit, "none");
            this.updates += this.clocks.length;
        }

        /** Gives a collective to its stream: it begins when the last rank has come to it, and shares the link. */
        #collect(what, unit) {
            const stream = STREAMS[what];
            const move = this.work[unit][what];
            const begun = this.clocks.map((clock) => Math.max(clock.now, clock.free[stream]));
            const begin = Math.max(...begun);
            const { other } = BESIDE[stream];
            const late = (clock, at) =>
                Math.min(Math.max(at - begin, 0) * clock.uses[other].filled, move.filled);
            const shared = this.clocks.reduce((most, clock) => Math.max(most, late(clock, clock.uses[other].until)), 0);
            const end = begin + move.seconds + shared;
            if (shared > 0) this.#share(stream, late);
            if (what === "reduce") this.#happens("gradients", unit, "reducing");
            if (what === "gather") this.#happens("parameters", unit, "gathering");
            this.clocks.forEach((clock, kind) => {
                clock.free[stream] = end;
                clock.uses[stream] = { until: end, filled: move.seconds > 0 ? move.filled / move.seconds : 0 };
                clock.arrived[what][unit] = end;
                clock.communicated += end - begun[kind];
                this.#span(kind, stream, what, unit, begun[kind], end);
            });
            if (what === "reduce") this.#happens("gradients", unit, "reduced", () => end);
            if (what === "gather") this.#happens("parameters", unit, "whole", () => end);
            this.messages += move.messages;
            this.sent += move.sent;
            this.updates += 2 * this.clocks.length;
        }

        /** What is given to the other stream, and not done yet, ends later. See `Run::send` in `run.rs`. */
        #share(stream, late) {
            const { other, given, of, state } = BESIDE[stream];
            for (const span of this.spans) {
                if (span.row !== other) continue;
                const clock = this.clocks[span.kind];
                span.start += late(clock, span.start);
                span.end += late(clock, span.end);
            }
            for (const event of this.events) {
                if (event.of === of && event.state === state) event.at += late(this.clocks[event.kind], event.at);
            }
            for (const clock of this.clocks) {
                for (const what of given) clock.arrived[what] = clock.arrived[what].map((at) => at + late(clock, at));
                const by = late(clock, clock.free[other]);
                clock.free[other] += by;
                clock.communicated += by;
                clock.uses[other].until += late(clock, clock.uses[other].until);
            }
        }

        #wait(what, unit) {
            this.clocks.forEach((clock, kind) => this.#standStill(kind, unit, clock.arrived[what][unit]));
            this.updates += this.clocks.length;
        }

        /** The ranks agree on the norm of all gradients: eight bytes for each parameter tensor, of which a unit has one. */
        #norm() {
            const { ranks, alphaUs, bandwidth, units } = this.setting;
            const { seconds } = ring({ ranks, alpha: alphaUs * 1e-6, beta: 1e-9 / bandwidth }, 8 * units, 1);
            const end = this.#end() + seconds;
            this.clocks.forEach((_, kind) => this.#standStill(kind, null, end));
            this.updates += this.clocks.length;
        }

        #standStill(kind, unit, until) {
            const clock = this.clocks[kind];
            if (until > clock.now) {
                this.#span(kind, "compute", "wait", unit, clock.now, until);
                clock.waited += until - clock.now;
                clock.now = until;
            }
        }
    }

    /** The most that is gathered at once, in bytes. A step begins with what the one before has gathered for it. */
    const peakGathered = (program, work) => {
        const gathered = new Set();
        let most = 0;
        for (const [what, unit] of [...program, ...program]) {
            if (what === "gather") gathered.add(unit);
            if (what === "free") gathered.delete(unit);
            let held = 0;
            for (const unit of gathered) held += work[unit].bytes;
            most = Math.max(most, held);
        }
        return most;
    };
})();

// Bytes of a rank by stage: the formulas of `fsdp-core/src/memory.rs`, for a model in equal units.
"use strict";
globalThis.fsdp ??= {};
(() => {
    const { divCeil } = fsdp;

    /** Elements of float32 state for each parameter. */
    const STATE_ELEMENTS = { adam: 2, "sgd-momentum": 1, sgd: 0 };

    /** Bytes of an element of parameters and gradients, and of the float32 copy that the optimizer updates. */
    const PRECISIONS = { f32: { element: 4, master: 0 }, bf16: { element: 2, master: 4 } };

    /** The most ranks that are looked at for `minRanks`. */
    const MOST_RANKS = 2 ** 20;

    /** What a unit of each kind costs: bytes of a parameter, of its gradient, of its optimizer state. */
    fsdp.bytesPerParameter = ({ optimizer, precision }) => {
        const { element, master } = PRECISIONS[precision];
        return { parameter: element, gradient: element, optimizer: 4 * STATE_ELEMENTS[optimizer] + master };
    };

    /** Elements of each unit: equal, as far as they divide. */
    fsdp.unitLens = (parameters, units) => {
        const [whole, rest] = [Math.floor(parameters / units), parameters % units];
        const before = (unit) => unit * whole + Math.floor((unit * rest) / units);
        return Array.from({ length: units }, (_, unit) => before(unit + 1) - before(unit));
    };

    /** What of `bytes` stays in memory. */
    const rest = (bytes, isOnDisk) => (isOnDisk ? 0 : bytes);

    /**
     * What a step holds of the largest unit's state, of which some is on a disk: of parameters the next, the new, and those
     * being written; of gradients the next, and, where no optimizer state is packed, those that are stepped; of optimizer
     * state what is read for the next unit, what is being written of the last one, and twice what is stepped. Buffers for
     * what is on its way lie in the memory of the host.
     */
    const tierBytes = (offload, unitLen, bytes, staying) =>
        (offload.parameters ? 3 * bytes.parameter * unitLen : 0) +
        (offload.gradients ? (offload.optimizer && bytes.optimizer > staying ? 1 : 2) * bytes.gradient * unitLen : 0) +
        (offload.optimizer ? 4 * (bytes.optimizer - staying) * unitLen : 0);

    /**
     * What the first rank holds, which has the largest blocks.
     *
     * `setting`: `parameters`, `units`, `ranks`, `optimizer`, `precision`, `prefetch` (units ahead), `activations` (bytes,
     * or `null`) and `offload`: which kinds of state lie on a disk.
     */
    fsdp.memory = (setting, stage, ranks = setting.ranks) => {
        const bytes = fsdp.bytesPerParameter(setting);
        const lens = fsdp.unitLens(setting.parameters, setting.units);
        const fullLen = setting.parameters;
        const shardLen = lens.reduce((sum, len) => sum + divCeil(len, ranks), 0);
        const largestLen = lens.reduce((most, len) => Math.max(most, len), 0);
        const windowLen = Math.min((setting.prefetch + 1) * largestLen, fullLen);
        // A rank alone has nothing to gather.
        const gatheredLen = stage === 3 && shardLen < fullLen ? windowLen : 0;
        const inFlightLen = stage === 1 ? 0 : Math.min(2 * largestLen, fullLen);
        const steppedLen = stage >= 1 ? shardLen : fullLen;
        // Only blocks can lie on a disk, not what is whole on every rank.
        const offload = { ...setting.offload, parameters: setting.offload.parameters && stage === 3 && ranks > 1 };
        // Whole gradients wait in memory for their reduction; only reduced ones lie elsewhere.
        const gradientsAway = offload.gradients && stage !== 1;
        // Masters beside whole parameters stay in memory.
        const staying = stage === 3 ? 0 : PRECISIONS[setting.precision].master;
        const unitLen = Math.ceil((largestLen * steppedLen) / Math.max(fullLen, 1));
        const estimate = {
            parameter_bytes: rest(bytes.parameter * (stage === 3 ? shardLen : fullLen), offload.parameters),
            gradient_bytes: rest(bytes.gradient * (stage >= 2 ? shardLen : fullLen), gradientsAway),
            optimizer_bytes:
                rest((bytes.optimizer - staying) * steppedLen, offload.optimizer) + staying * steppedLen,
            gathered_bytes: bytes.parameter * gatheredLen,
            reducing_bytes: bytes.gradient * inFlightLen,
            tier_bytes: tierBytes(offload, unitLen, bytes, staying),
            activation_bytes: setting.activations,
        };
        estimate.state_bytes = estimate.parameter_bytes + estimate.gradient_bytes + estimate.optimizer_bytes;
        // Activations are complete when backward begins, gradients when it ends; what is on a disk passes in the step.
        const always = estimate.parameter_bytes + estimate.optimizer_bytes + estimate.gathered_bytes;
        const begin = estimate.activation_bytes ?? 0;
        const end = estimate.gradient_bytes + estimate.reducing_bytes;
        const step = estimate.gradient_bytes + estimate.tier_bytes;
        estimate.peak_bytes = always + Math.max(begin, end, step);
        return estimate;
    };

    /** The least number of ranks on which the peak fits into `deviceBytes`; `null` where no number does. */
    fsdp.minRanks = (setting, stage, deviceBytes) => {
        const fits = (ranks) => fsdp.memory(setting, stage, ranks).peak_bytes <= deviceBytes;
        if (fits(1)) return 1;
        let [tooFew, enough] = [1, 2];
        while (!fits(enough)) {
            [tooFew, enough] = [enough, enough * 2];
            if (enough > MOST_RANKS) return null;
        }
        while (enough - tooFew > 1) {
            const middle = Math.floor((tooFew + enough) / 2);
            if (fits(middle)) enough = middle;
            else tooFew = middle;
        }
        return enough;
    };
})();

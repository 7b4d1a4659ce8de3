// Which block of a tensor each rank of a mesh holds: `mesh.rs`, `spec.rs` and `layout.rs` of `fsdp-core`.
"use strict";
globalThis.fsdp ??= {};
(() => {
    const { divCeil } = fsdp;

    /** Ranks as a grid with named axes, `[["replicate", 2], ["shard", 3]]`, numbered row by row. */
    fsdp.Mesh = class {
        constructor(axes) {
            this.axes = axes;
            this.worldSize = axes.reduce((product, [, size]) => product * size, 1);
        }

        /** Ranks along an axis; 1 where the mesh does not have it. */
        size(axis) {
            return this.axes.find(([other]) => other === axis)?.[1] ?? 1;
        }

        /** The index of `rank` along each axis. */
        coordinates(rank) {
            let [block, rest] = [this.worldSize, rank];
            return this.axes.map(([, size]) => {
                block /= size;
                const index = Math.floor(rest / block);
                rest %= block;
                return index;
            });
        }

        coordinate(axis, rank) {
            const at = this.axes.findIndex(([other]) => other === axis);
            return at < 0 ? 0 : this.coordinates(rank)[at];
        }

        /** The ranks that differ from `rank` only along `axis`, itself among them. */
        group(axis, rank) {
            const others = (of) => JSON.stringify(this.coordinates(of).filter((_, at) => this.axes[at][0] !== axis));
            return Array.from({ length: this.worldSize }, (_, other) => other).filter(
                (other) => others(other) === others(rank),
            );
        }

        toString() {
            return `{ ${this.axes.map(([axis, size]) => `${axis} = ${size}`).join(", ")} }`;
        }
    };

    /** A tensor of `shape` in `numShards` blocks along `dim`: row i is in block ⌊i / ⌈rows / numShards⌉⌋. */
    fsdp.ShardLayout = class {
        constructor(shape, dim, numShards) {
            Object.assign(this, { shape, dim, numShards, chunk: divCeil(shape[dim], numShards) });
        }

        /** The rows of a block: the first, and the first that is no longer in it. */
        rows(block) {
            const rows = this.shape[this.dim];
            return [Math.min(block * this.chunk, rows), Math.min((block + 1) * this.chunk, rows)];
        }

        shardShape(block) {
            const [from, to] = this.rows(block);
            return this.shape.with(this.dim, to - from);
        }

        shardLen(block) {
            return this.shardShape(block).reduce((product, size) => product * size, 1);
        }

        /** The block that holds a row of the dimension that is cut. */
        blockOf(row) {
            return Math.floor(row / this.chunk);
        }

        /** The elements of a block in the row-major tensor, as contiguous ranges `[from, to]`. */
        runs(block) {
            const product = (sizes) => sizes.reduce((all, size) => all * size, 1);
            const outer = product(this.shape.slice(0, this.dim));
            const inner = product(this.shape.slice(this.dim + 1));
            const [from, to] = this.rows(block);
            const run = (_, at) => [from, to].map((row) => (at * this.shape[this.dim] + row) * inner);
            return Array.from({ length: outer }, run).filter(([start, end]) => start < end);
        }
    };
})();

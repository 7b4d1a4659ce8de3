//! Settings that are one of a few names.

use std::fmt;

/// Declares an enum whose variants have a name in the configuration file. The first variant is the default.
macro_rules! named_choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$variant_doc])* $variant,)+ }

        impl $name {
            /// All values; the first is the default.
            pub const ALL: &'static [$name] = &[$($name::$variant),+];

            /// The names in the configuration file, in the order of [`Self::ALL`].
            pub const NAMES: &'static [&'static str] = &[$($text),+];

            /// The name in the configuration file.
            pub fn name(self) -> &'static str {
                Self::NAMES[self as usize]
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::ALL[0]
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

named_choice! {
    /// When the gradients of micro-batches are reduced over the ranks.
    Accumulate {
        /// After every micro-batch: gradients stay as sharded as the stage says, at the price of one reduction each.
        Reduced = "reduced",
        /// Once per optimizer step: every rank holds full gradients until then, 4 bytes per parameter.
        Local = "local",
    }
}

named_choice! {
    /// How gradients of the ranks become one.
    GradientReduction {
        /// The mean over the ranks, for every stage and mesh.
        Mean = "mean",
        /// The sum over the ranks.
        Sum = "sum",
    }
}

named_choice! {
    /// What happens when the global gradient norm is NaN or infinite. All ranks see the same norm, so all do the same.
    NonFinite {
        /// The step is an error, and weights stay as they were.
        Error = "error",
        /// The update is left out, and weights stay as they were.
        Skip = "skip",
        /// The update goes ahead with whatever values there are.
        Propagate = "propagate",
    }
}

named_choice! {
    /// Whose running statistics (batch norm) and other buffers all ranks go on with after an optimizer step.
    Buffers {
        /// The mean over the ranks.
        Sync = "sync",
        /// Rank 0's.
        Rank0 = "rank 0",
        /// Each rank its own; a checkpoint has rank 0's.
        Local = "local",
    }
}

named_choice! {
    /// By which way ranks on devices exchange parameters and gradients.
    Exchange {
        /// Through the memory of their hosts, as ranks on processors do.
        Host = "host",
        /// From device to device: between GPUs by NCCL, on a device that ranks share within it.
        Device = "device",
        /// As [`Exchange::Device`], with NCCL on the stream of the kernels, so that it overlaps nothing: to compare.
        Inline = "device inline",
    }
}

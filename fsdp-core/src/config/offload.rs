//! The settings of tiers: which part of the state lies in which memory between its uses.

/// Where one kind of state lies: shares of its bytes by tier, in 0 to 1. What is left lies on the device.
///
/// ```
/// use fsdp_core::TierShares;
///
/// let mostly = TierShares { cpu: 0.0, nvme: 0.8 };
/// // Whole parameters are placed, spread evenly over the model, until the share is reached.
/// assert_eq!(mostly.on_nvme(&[100; 5]), [true, true, false, true, true]);
/// assert_eq!(TierShares::NVME.on_nvme(&[7, 0]), [true, false]);
/// assert_eq!(TierShares::DEVICE.on_nvme(&[7, 0]), [false, false]);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TierShares {
    /// In host memory. Where the device computes in host memory, as the CPU backend does, that is the same place.
    pub cpu: f64,
    /// In a file on a disk.
    pub nvme: f64,
}

impl TierShares {
    /// All on the device.
    pub const DEVICE: TierShares = TierShares { cpu: 0.0, nvme: 0.0 };
    /// All in host memory.
    pub const CPU: TierShares = TierShares { cpu: 1.0, nvme: 0.0 };
    /// All on a disk.
    pub const NVME: TierShares = TierShares { cpu: 0.0, nvme: 1.0 };

    /// Where `#[shard(unit, offload = "...")]` puts a unit: `none` is the device, and `cpu` and `nvme` are themselves.
    pub fn of_attribute(name: &str) -> Option<Self> {
        match name {
            "none" => Some(Self::DEVICE),
            "cpu" => Some(Self::CPU),
            "nvme" => Some(Self::NVME),
            _ => None,
        }
    }

    /// Which parameters, given by their bytes, lie on a disk. Empty ones never do.
    pub fn on_nvme(&self, bytes: &[usize]) -> Vec<bool> {
        let (mut total, mut placed) = (0.0, 0.0);
        let place = |&bytes: &usize| {
            let bytes = bytes as f64;
            total += bytes;
            // In whatever part of the model, the share is kept as well as whole parameters allow.
            let takes = bytes > 0.0 && placed + bytes / 2.0 <= self.nvme * total && self.nvme > 0.0;
            placed += if takes { bytes } else { 0.0 };
            takes
        };
        bytes.iter().map(place).collect()
    }

    /// Which parameters, given by their bytes, lie in host memory: of those that do not lie on a disk, as large a part as the
    /// share asks for.
    pub fn on_cpu(&self, bytes: &[usize]) -> Vec<bool> {
        let on_nvme = self.on_nvme(bytes);
        let others: Vec<_> =
            bytes.iter().zip(on_nvme).map(|(&bytes, on_nvme)| if on_nvme { 0 } else { bytes }).collect();
        let rest = 1.0 - self.nvme;
        let share = if rest > 0.0 { (self.cpu / rest).min(1.0) } else { 0.0 };
        TierShares { cpu: 0.0, nvme: share }.on_nvme(&others)
    }

    /// Whether the shares are shares.
    pub(super) fn is_valid(&self) -> bool {
        let share = |share: f64| (0.0..=1.0).contains(&share);
        share(self.cpu) && share(self.nvme) && self.cpu + self.nvme <= 1.0 + 1e-9
    }

    /// Where all of it lies, if it lies in one place.
    pub(crate) fn name(&self) -> Option<&'static str> {
        [("device", Self::DEVICE), ("cpu", Self::CPU), ("nvme", Self::NVME)]
            .into_iter()
            .find_map(|(name, placement)| (placement == *self).then_some(name))
    }

    /// The opposite of [`TierShares::name`].
    pub(super) fn named(name: &str) -> Option<Self> {
        [Self::DEVICE, Self::CPU, Self::NVME].into_iter().find(|placement| placement.name() == Some(name))
    }

    /// Names of a place for all of it.
    pub(super) const NAMES: &'static [&'static str] = &["device", "cpu", "nvme"];
}

/// What lies below the device's memory between its uses, and how the disk is used.
#[derive(Clone, Debug, PartialEq)]
pub struct OffloadConfig {
    /// Optimizer state. Default: on the device.
    pub optimizer: TierShares,
    /// Reduced gradients, until the step. Default: on the device.
    pub gradients: TierShares,
    /// Parameters, at stage 3: each rank's blocks, between gathers. Default: on the device.
    pub parameters: TierShares,
    /// The run's directory on a disk. Needed where anything is placed on NVMe. Default: `None`.
    pub nvme_path: Option<String>,
    /// Memory of each rank for blocks on their way to and from the disk, in bytes. Default: 16 MiB.
    pub nvme_buffer_bytes: usize,
    /// Bytes that move at a time, a multiple of 4096. Default: 1 MiB.
    pub nvme_block_bytes: usize,
    /// Whether what is read from the disk is compared with a checksum of what was written. Default: yes.
    pub nvme_checksums: bool,
}

impl Default for OffloadConfig {
    fn default() -> Self {
        Self {
            optimizer: TierShares::DEVICE,
            gradients: TierShares::DEVICE,
            parameters: TierShares::DEVICE,
            nvme_path: None,
            nvme_buffer_bytes: 16 << 20,
            nvme_block_bytes: 1 << 20,
            nvme_checksums: true,
        }
    }
}

impl OffloadConfig {
    /// The first key that places anything on a disk.
    pub fn nvme_key(&self) -> Option<&'static str> {
        [("optimizer", self.optimizer), ("gradients", self.gradients), ("parameters", self.parameters)]
            .into_iter()
            .find_map(|(key, placement)| (placement.nvme > 0.0).then_some(key))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_share_is_kept_to_half_a_parameter(
            nvme in 0.0..=1.0f64,
            bytes in proptest::collection::vec(0..1000usize, 0..40),
        ) {
            let placed = TierShares { cpu: 0.0, nvme }.on_nvme(&bytes);
            let on_disk: usize = bytes.iter().zip(&placed).filter(|(_, placed)| **placed).map(|(bytes, _)| bytes).sum();
            let (total, largest) = (bytes.iter().sum::<usize>() as f64, bytes.iter().copied().max().unwrap_or(0) as f64);
            prop_assert!((on_disk as f64 - nvme * total).abs() <= largest, "{on_disk} of {total} at {nvme}");
            // The rest in host memory: every parameter lies in one place.
            let shares = TierShares { cpu: 1.0 - nvme, nvme };
            let both = shares.on_nvme(&bytes).into_iter().zip(shares.on_cpu(&bytes)).zip(&bytes);
            prop_assert!(both.into_iter().all(|((nvme, cpu), bytes)| !(nvme && cpu) && ((nvme || cpu) == (*bytes > 0))));
            prop_assert!(nvme < 1.0 || bytes.iter().zip(&placed).all(|(bytes, placed)| *placed == (*bytes > 0)));
        }
    }
}

//! Devices, links and disks by name, each figure with its source, and what a collective costs on them.
//!
//! Figures are peaks from data sheets, per device and direction. What a program reaches of a device's arithmetic is less:
//! callers multiply it with a share of their own.

use serde::{Deserialize, Serialize};

use crate::{Link, StepTraffic};

/// A device as its maker describes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Device {
    /// The name that commands take.
    pub name: &'static str,
    /// Memory, in bytes.
    pub memory_bytes: u64,
    /// Operations per second on 16-bit floats with 32-bit sums, dense.
    pub flops_16: f64,
    /// Operations per second on 32-bit floats, without tensor cores.
    pub flops_32: f64,
    /// Bytes per second of its memory.
    pub memory_bytes_per_s: f64,
    /// The link between devices of one node, by its name in [`NamedLink::ALL`].
    pub link: &'static str,
    /// The link to the memory of its host, likewise.
    pub host_link: &'static str,
    /// Where the figures come from.
    pub source: &'static str,
}

impl Device {
    /// All that are known.
    pub const ALL: [Device; 4] = [
        Device {
            name: "H100",
            memory_bytes: 80_000_000_000,
            flops_16: 989.4e12,
            flops_32: 66.9e12,
            memory_bytes_per_s: 3.35e12,
            link: "nvlink4",
            host_link: "pcie5",
            source: "NVIDIA H100 Tensor Core GPU Architecture, white paper, 2022: H100 SXM5",
        },
        Device {
            name: "H200",
            memory_bytes: 141_000_000_000,
            flops_16: 989.4e12,
            flops_32: 66.9e12,
            memory_bytes_per_s: 4.8e12,
            link: "nvlink4",
            host_link: "pcie5",
            source: "NVIDIA H200 Tensor Core GPU, data sheet, 2024: H200 SXM",
        },
        Device {
            name: "A100",
            memory_bytes: 80_000_000_000,
            flops_16: 312e12,
            flops_32: 19.5e12,
            memory_bytes_per_s: 2.039e12,
            link: "nvlink3",
            host_link: "pcie4",
            source: "NVIDIA A100 Tensor Core GPU, data sheet, 2022: A100 80GB SXM",
        },
        Device {
            name: "4090",
            memory_bytes: 24_000_000_000,
            flops_16: 165.2e12,
            flops_32: 82.6e12,
            memory_bytes_per_s: 1.008e12,
            link: "pcie4",
            host_link: "pcie4",
            source: "NVIDIA Ada GPU Architecture, white paper, 2022: GeForce RTX 4090",
        },
    ];

    /// The device called `name`, whatever its case.
    pub fn find(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|device| device.name.eq_ignore_ascii_case(name))
    }
}

/// Bytes per second of what lies below a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierRate {
    /// Towards the device.
    pub read_bytes_per_s: f64,
    /// Away from it.
    pub write_bytes_per_s: f64,
}

impl TierRate {
    /// So fast that moving takes no time.
    pub const FREE: TierRate = TierRate { read_bytes_per_s: f64::INFINITY, write_bytes_per_s: f64::INFINITY };

    /// The part of one of `num_users` that share `num_disks`.
    pub fn shared(self, num_disks: u64, num_users: u64) -> Self {
        let part = num_disks as f64 / num_users.max(1) as f64;
        Self { read_bytes_per_s: part * self.read_bytes_per_s, write_bytes_per_s: part * self.write_bytes_per_s }
    }
}

/// A disk as its maker describes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Disk {
    /// The name that commands take.
    pub name: &'static str,
    /// Sequential reads and writes.
    pub rate: TierRate,
    /// Where the figures come from.
    pub source: &'static str,
}

impl Disk {
    /// All that are known.
    pub const ALL: [Disk; 3] = [
        Self::new("pm9a3", 6.5e9, 3.5e9, "Samsung PM9A3, announcement, 2020: U.2, PCI Express 4.0"),
        Self::new("990pro", 7.45e9, 6.9e9, "Samsung 990 PRO, announcement, 2022: M.2, PCI Express 4.0"),
        Self::new("9100pro", 14.7e9, 13.4e9, "Samsung 9100 PRO, announcement, 2025: M.2, PCI Express 5.0"),
    ];

    const fn new(name: &'static str, read_bytes_per_s: f64, write_bytes_per_s: f64, source: &'static str) -> Self {
        Self { name, rate: TierRate { read_bytes_per_s, write_bytes_per_s }, source }
    }

    /// The disk called `name`, whatever its case.
    pub fn find(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|disk| disk.name.eq_ignore_ascii_case(name))
    }
}

/// A link by name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NamedLink {
    /// The name that commands take.
    pub name: &'static str,
    /// Latency and bandwidth of one direction, for one rank.
    pub link: Link,
    /// Where the figures come from.
    pub source: &'static str,
}

/// Latency of one hop, in seconds, as NCCL assumes it for a ring with its protocol Simple: the table `hwLat` of
/// `src/graph/tuning.cc`.
const NVLINK_S: f64 = 3.4e-6;
const PCIE_S: f64 = 5.7e-6;
const NETWORK_S: f64 = 9.6e-6;

impl NamedLink {
    /// All that are known.
    pub const ALL: [NamedLink; 9] = [
        Self::new("nvlink4", NVLINK_S, 450e9, "NVIDIA H100 data sheet: 900 GB/s both ways; latency: NCCL"),
        Self::new("nvlink3", NVLINK_S, 300e9, "NVIDIA A100 data sheet: 600 GB/s both ways; latency: NCCL"),
        Self::new("pcie5", PCIE_S, 63e9, "PCI Express 5.0, 16 lanes of 32 GT/s, 128b/130b; latency: NCCL"),
        Self::new("pcie4", PCIE_S, 31.5e9, "PCI Express 4.0, 16 lanes of 16 GT/s, 128b/130b; latency: NCCL"),
        Self::new("ib-ndr", NETWORK_S, 50e9, "InfiniBand NDR, 4 lanes: 400 Gbit/s; latency: NCCL"),
        Self::new("ib-hdr", NETWORK_S, 25e9, "InfiniBand HDR, 4 lanes: 200 Gbit/s; latency: NCCL"),
        Self::new("eth-100g", NETWORK_S, 12.5e9, "IEEE 802.3, 100 Gbit/s Ethernet; latency: NCCL, as for any network"),
        Self::new("eth-25g", NETWORK_S, 3.125e9, "IEEE 802.3, 25 Gbit/s Ethernet; latency: NCCL, as for any network"),
        Self::new("eth-10g", NETWORK_S, 1.25e9, "IEEE 802.3, 10 Gbit/s Ethernet; latency: NCCL, as for any network"),
    ];

    const fn new(name: &'static str, alpha_s: f64, bytes_per_s: f64, source: &'static str) -> Self {
        Self { name, link: Link { alpha_s, beta_s_per_byte: 1.0 / bytes_per_s }, source }
    }

    /// The link called `name`, whatever its case.
    pub fn find(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|link| link.name.eq_ignore_ascii_case(name))
    }
}

/// How the ranks of one collective lie on nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Ranks that take part.
    pub num_ranks: u64,
    /// Nodes that they are on.
    pub num_nodes: u64,
}

impl Placement {
    /// All ranks on one node.
    pub fn one_node(num_ranks: u64) -> Self {
        Self { num_ranks, num_nodes: 1 }
    }

    /// Ranks `first`, `first + stride`, ... of a world in which every `ranks_per_node` ranks are a node.
    pub fn strided(num_ranks: u64, stride: u64, ranks_per_node: u64) -> Self {
        let per_node = (ranks_per_node / stride.max(1)).max(1);
        Self { num_ranks, num_nodes: num_ranks.div_ceil(per_node).max(1) }
    }
}

/// Links in two levels. A ring visits the ranks of a node before it goes on to the next node.
///
/// ```
/// use fsdp_core::{Link, Network, Placement};
///
/// // 1 µs and 100 GB/s in a node; 10 µs and 10 GB/s between nodes, for each rank.
/// let (in_node, between) = (Link { alpha_s: 1e-6, beta_s_per_byte: 1e-11 }, Link { alpha_s: 1e-5, beta_s_per_byte: 1e-10 });
/// let network = Network { in_node, between, ranks_per_node: 8 };
/// let placed = Placement { num_ranks: 16, num_nodes: 2 };
/// // 15 hops of which one leaves a node; eight ranks share what leaves it, so 80 GB/s are the narrowest part.
/// let time_s = network.all_gather_s(placed, 1_000_000);
/// assert!((time_s - (14.0 * 1e-6 + 1e-5 + 15.0 * 1e6 / 80e9)).abs() < 1e-12);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Between ranks of one node.
    pub in_node: Link,
    /// Between nodes: latency, and the bandwidth that each rank has for itself.
    pub between: Link,
    /// Ranks of one node.
    pub ranks_per_node: u64,
}

impl Network {
    /// One node, however many ranks.
    pub fn one_node(link: Link) -> Self {
        Self { in_node: link, between: link, ranks_per_node: u64::MAX }
    }

    /// Seconds of an all-gather, or of a reduce-scatter, of shards of `shard_bytes`.
    ///
    /// As NCCL's own model of a ring (`src/graph/tuning.cc`): hops in a node and between nodes have their latencies, and
    /// the narrowest part of the ring decides the bandwidth. A node's ranks send to the next node side by side.
    pub fn all_gather_s(&self, placed: Placement, shard_bytes: u64) -> f64 {
        let hops = placed.num_ranks.saturating_sub(1);
        if placed.num_nodes <= 1 {
            return self.in_node.time_s(&StepTraffic::all_gather(placed.num_ranks, shard_bytes), 1);
        }
        let leaving = placed.num_nodes - 1;
        let latency_s = (hops - leaving) as f64 * self.in_node.alpha_s + leaving as f64 * self.between.alpha_s;
        let side_by_side = placed.num_ranks.div_ceil(placed.num_nodes);
        let between = self.between.beta_s_per_byte / side_by_side as f64;
        let narrowest = if side_by_side == 1 { between } else { between.max(self.in_node.beta_s_per_byte) };
        latency_s + narrowest * hops as f64 * shard_bytes as f64
    }

    /// Seconds of an all-reduce of `full_bytes`: a reduce-scatter, then an all-gather.
    pub fn all_reduce_s(&self, placed: Placement, full_bytes: u64) -> f64 {
        2.0 * self.all_gather_s(placed, full_bytes.div_ceil(placed.num_ranks.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_any_case_and_every_figure_has_a_source() {
        assert_eq!(Device::find("h100").unwrap().memory_bytes, 80_000_000_000);
        assert_eq!(Device::find("H300"), None);
        for device in Device::ALL {
            for link in [device.link, device.host_link] {
                assert!(NamedLink::find(link).is_some(), "{} has an unknown link", device.name);
            }
            assert!(device.source.contains("20"), "{} needs a source with its year", device.name);
        }
        for disk in Disk::ALL {
            assert_eq!(Disk::find(&disk.name.to_uppercase()), Some(disk));
            assert!(disk.source.contains("20"), "{} needs a source with its year", disk.name);
        }
        for link in NamedLink::ALL {
            assert!(link.source.len() > 20, "{}", link.name);
            assert_eq!(NamedLink::find(&link.name.to_uppercase()), Some(link));
        }
    }

    #[test]
    fn within_a_node_a_collective_costs_what_the_traffic_model_says() {
        let link = Link { alpha_s: 0.5, beta_s_per_byte: 0.25 };
        let network = Network::one_node(link);
        for num_ranks in [1, 2, 5, 8] {
            let placed = Placement::one_node(num_ranks);
            let gather = link.time_s(&StepTraffic::all_gather(num_ranks, 12), 1);
            assert_eq!(network.all_gather_s(placed, 12), gather);
            assert_eq!(network.all_reduce_s(placed, 12 * num_ranks), 2.0 * gather);
        }
    }

    #[test]
    fn ranks_that_are_far_apart_lie_on_as_many_nodes() {
        assert_eq!(Placement::strided(16, 1, 8), Placement { num_ranks: 16, num_nodes: 2 });
        assert_eq!(Placement::strided(4, 1, 8), Placement { num_ranks: 4, num_nodes: 1 });
        // One rank of each node.
        assert_eq!(Placement::strided(4, 8, 8), Placement { num_ranks: 4, num_nodes: 4 });
        assert_eq!(Placement::strided(4, 4, 8), Placement { num_ranks: 4, num_nodes: 2 });
        assert_eq!(Placement::strided(4, 16, u64::MAX).num_nodes, 1);
    }

    #[test]
    fn a_rank_alone_on_its_node_has_only_its_own_way_out() {
        let link = |beta_s_per_byte| Link { alpha_s: 0.0, beta_s_per_byte };
        let network = Network { in_node: link(1.0), between: link(10.0), ranks_per_node: 8 };
        assert_eq!(network.all_gather_s(Placement { num_ranks: 4, num_nodes: 4 }, 1), 30.0);
        // Four side by side: a quarter each, still wider in the node.
        assert_eq!(network.all_gather_s(Placement { num_ranks: 8, num_nodes: 2 }, 1), 7.0 * 2.5);
        let fast_out = Network { between: link(0.1), ..network };
        assert_eq!(fast_out.all_gather_s(Placement { num_ranks: 8, num_nodes: 2 }, 1), 7.0);
    }
}

//! The options that say what lies below a device's memory, and how fast it is reached.

use std::error::Error;

use clap::Args;
use fsdp_core::{Config, Device, Disk, NamedLink, Profile, TierRate, TierRates, TierShares};

use crate::machine::Told;
use crate::number::{MOST, between, up_to};
use crate::rate::rate;

/// Where an offloaded part lies while nothing else is said.
const DEFAULT_PATH: &str = "/nvme/run";

#[derive(Args)]
#[command(next_help_heading = "Offload")]
pub(crate) struct TierArgs {
    /// What lies elsewhere between its uses, in place of the configuration's section offload, such as optimizer=nvme,parameters=cpu
    /// or optimizer=nvme:0.8 for a share
    #[arg(long, value_name = "PART=TIER", value_parser = parse_offload, value_delimiter = ',')]
    offload: Vec<Offload>,
    /// Disk of a node: pm9a3, 990pro or 9100pro
    #[arg(long, value_name = "NAME", default_value = "pm9a3")]
    nvme: String,
    /// Disks of a node, which its ranks share
    #[arg(long, value_name = "N", default_value = "1", value_parser = up_to(MOST))]
    nvme_disks: usize,
    /// Rate of reading from one disk, in GB/s, in place of the known one
    #[arg(long, value_name = "GBS", value_parser = between(1e-9, 1e9))]
    nvme_read: Option<f64>,
    /// Rate of writing to one disk, in GB/s
    #[arg(long, value_name = "GBS", value_parser = between(1e-9, 1e9))]
    nvme_write: Option<f64>,
    /// Bandwidth between a device and the memory of its host, in GB/s in each direction [default: the device's]
    #[arg(long, value_name = "GBS", value_parser = between(1e-9, 1e9))]
    host_bandwidth: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Offload {
    part: Part,
    shares: TierShares,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Optimizer,
    Gradients,
    Parameters,
}

fn parse_offload(text: &str) -> Result<Offload, String> {
    let parsed = text.split_once('=').and_then(|(part, place)| {
        let part = match part {
            "optimizer" => Part::Optimizer,
            "gradients" => Part::Gradients,
            "parameters" => Part::Parameters,
            _ => return None,
        };
        let (tier, share) = match place.split_once(':') {
            Some((tier, share)) => (tier, share.parse().ok()?),
            None => (place, 1.0),
        };
        let shares = match tier {
            "device" => TierShares::DEVICE,
            "cpu" => TierShares { cpu: share, nvme: 0.0 },
            "nvme" => TierShares { cpu: 0.0, nvme: share },
            _ => return None,
        };
        (0.0..=1.0).contains(&share).then_some(Offload { part, shares })
    });
    parsed.ok_or_else(|| {
        format!(
            "`{text}` is no offload; write optimizer, gradients or parameters, `=`, and device, cpu or nvme, with `:` and a \
             share from 0 to 1 for a part"
        )
    })
}

impl TierArgs {
    /// Puts what the options say of offload into the configuration.
    pub(crate) fn place(&self, config: &mut Config) {
        let offload = &mut config.offload;
        for Offload { part, shares } in &self.offload {
            match part {
                Part::Optimizer => offload.optimizer = *shares,
                Part::Gradients => offload.gradients = *shares,
                Part::Parameters => offload.parameters = *shares,
            }
        }
        if offload.nvme_key().is_some() {
            offload.nvme_path.get_or_insert_with(|| DEFAULT_PATH.to_owned());
        }
    }

    /// How fast the tiers are that the configuration uses, for one of `num_users` ranks of a node.
    pub(crate) fn rates(
        &self,
        config: &Config,
        device: Option<Device>,
        profile: Option<&Profile>,
        num_users: u64,
    ) -> Result<(TierRates, Told), Box<dyn Error>> {
        let offload = &config.offload;
        let parts =
            [("optimizer", offload.optimizer), ("gradients", offload.gradients), ("parameters", offload.parameters)];
        let mut told = Told::new();
        let places = parts.iter().filter(|(_, shares)| *shares != TierShares::DEVICE);
        let places: Vec<_> = places.map(|(part, shares)| format!("{part} {}", told_place(*shares))).collect();
        if !places.is_empty() {
            told.push(("offload", places.join(", ")));
        }
        let uses_host = parts.iter().any(|(_, shares)| shares.cpu > 0.0);
        let host = match (self.host_bandwidth, device) {
            (Some(gb_s), _) => Some(gb_s * 1e9),
            (None, Some(device)) => NamedLink::find(device.host_link).map(|named| 1.0 / named.link.beta_s_per_byte),
            // Ranks that are threads compute in host memory.
            (None, None) => None,
        };
        if let Some(bytes_per_s) = host.filter(|_| uses_host) {
            let source = match (self.host_bandwidth, device.and_then(|device| NamedLink::find(device.host_link))) {
                (None, Some(named)) => format!(": {} ({})", named.name, named.source),
                _ => ": as given".to_owned(),
            };
            told.push(("host", format!("{} each way{source}", rate(bytes_per_s, "B"))));
        }
        let both = |bytes_per_s| TierRate { read_bytes_per_s: bytes_per_s, write_bytes_per_s: bytes_per_s };
        let host = host.map(both);
        if offload.nvme_key().is_none() {
            return Ok((TierRates { host, nvme: None }, told));
        }
        if let (Some(profile), None, None) = (profile, self.nvme_read, self.nvme_write) {
            let measured = profile.nvme.ok_or(
                "the profile has no disk, and something is offloaded to one; measure with `fsdp bench --nvme-path DIR`, or \
                 give --nvme-read with --nvme-write",
            )?;
            told.push(("disk", format!("{}, for each rank, as measured", told_rate(measured))));
            return Ok((TierRates { host, nvme: Some(measured) }, told));
        }
        let known = Disk::find(&self.nvme).ok_or_else(|| {
            let names = Disk::ALL.map(|disk| disk.name).join(", ");
            format!("--nvme: `{}` is not known; take one of {names}, or --nvme-read with --nvme-write", self.nvme)
        })?;
        let given = TierRate {
            read_bytes_per_s: self.nvme_read.map_or(known.rate.read_bytes_per_s, |gb_s| gb_s * 1e9),
            write_bytes_per_s: self.nvme_write.map_or(known.rate.write_bytes_per_s, |gb_s| gb_s * 1e9),
        };
        let source = if given == known.rate { format!("{} ({})", known.name, known.source) } else { "as given".into() };
        told.push((
            "disk",
            format!("{} in each node, {}, shared by {num_users} ranks: {source}", self.nvme_disks, told_rate(given)),
        ));
        Ok((TierRates { host, nvme: Some(given.shared(self.nvme_disks as u64, num_users)) }, told))
    }
}

fn told_rate(TierRate { read_bytes_per_s, write_bytes_per_s }: TierRate) -> String {
    format!("{} read and {} written", rate(read_bytes_per_s, "B"), rate(write_bytes_per_s, "B"))
}

fn told_place(TierShares { cpu, nvme }: TierShares) -> String {
    let part = |share: f64, place: &str| match share {
        0.0 => None,
        1.0 => Some(place.to_owned()),
        share => Some(format!("{:.0}% {place}", 100.0 * share)),
    };
    [part(cpu, "in host memory"), part(nvme, "on disk")].into_iter().flatten().collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offload_is_a_part_a_tier_and_a_share() {
        let shares = |text: &str| parse_offload(text).unwrap().shares;
        assert_eq!(shares("optimizer=nvme"), TierShares::NVME);
        assert_eq!(shares("gradients=cpu:0.25"), TierShares { cpu: 0.25, nvme: 0.0 });
        assert_eq!(shares("parameters=device"), TierShares::DEVICE);
        for text in ["optimizer", "optimizer=disk", "weights=cpu", "optimizer=nvme:1.5", "optimizer=nvme:nan", "="] {
            assert!(parse_offload(text).unwrap_err().contains("is no offload; write optimizer, "), "{text}");
        }
    }
}

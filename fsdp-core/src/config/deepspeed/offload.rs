//! DeepSpeed's offload: which of our tiers its sections mean.
//!
//! A section says the device, its other keys how; so what becomes of a key is known when all have been read.

use super::apply::{DEVICES, switch, text, unknown_name, whole};
use super::keys::{Fate, Told, number};
use super::{TranslatedItem, Translator};
use crate::TierShares;
use crate::config::ConfigError;
use crate::config::tree::Value;

/// Where DeepSpeed's examples put what no path is given for.
const DEFAULT_PATH: &str = "/local_nvme";

/// The directory below a given one, since a run needs one of its own.
const OWN_DIRECTORY: &str = "fsdp";

/// The largest block that a disk moves at a time.
const MOST_BLOCK_BYTES: usize = 1 << 30;

/// What the sections say.
#[derive(Debug, Default)]
pub(super) struct Offload {
    optimizer: Section,
    parameters: Section,
    block_bytes: Option<usize>,
    queue_depth: Option<usize>,
}

/// `offload_optimizer` or `offload_param`.
#[derive(Debug, Default)]
struct Section {
    device: Device,
    share: Option<f64>,
    path: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Device {
    #[default]
    None,
    Cpu,
    Nvme,
}

impl Section {
    fn shares(&self) -> TierShares {
        let share = self.share.unwrap_or(1.0);
        match self.device {
            Device::None => TierShares::DEVICE,
            Device::Cpu => TierShares { cpu: share, nvme: 0.0 },
            Device::Nvme => TierShares { cpu: 0.0, nvme: share },
        }
    }
}

/// What becomes of the key follows from the others, at the end.
fn later() -> Result<Told, ConfigError> {
    Ok((Fate::Set, String::new()))
}

impl Offload {
    fn section(&mut self, key: &str) -> &mut Section {
        if key.contains("offload_param") { &mut self.parameters } else { &mut self.optimizer }
    }
}

pub(super) fn cpu_offload(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    if switch(translator, key, value)? {
        translator.offload.section(key).device = Device::Cpu;
    }
    later()
}

pub(super) fn device(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    let device = match value {
        Value::Other("null") => Device::None,
        _ => match text(translator, key, value)? {
            "none" => Device::None,
            "cpu" => Device::Cpu,
            "nvme" => Device::Nvme,
            other => return Err(unknown_name(translator, key, other, DEVICES)),
        },
    };
    translator.offload.section(key).device = device;
    later()
}

pub(super) fn ratio(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    let Some(share) = number(value) else { return Err(translator.wrong_type(key, "a share from 0 to 1", value)) };
    if !(0.0..=1.0).contains(&share) {
        let (key, allowed, got) = (key.to_owned(), "a share from 0 to 1".to_owned(), share.to_string());
        return Err(ConfigError::OutOfRange { at: translator.at(), key, allowed, got });
    }
    translator.offload.section(key).share = Some(share);
    later()
}

pub(super) fn nvme_path(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    let path = match value {
        Value::Other("null") => None,
        _ => Some(text(translator, key, value)?.to_owned()).filter(|path| !path.is_empty()),
    };
    translator.offload.section(key).path = path;
    later()
}

pub(super) fn max_in_cpu(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    whole(translator, key, value, 0)?;
    later()
}

pub(super) fn block_size(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    translator.offload.block_bytes = Some(whole(translator, key, value, 1)?);
    later()
}

pub(super) fn queue_depth(translator: &mut Translator, key: &str, value: &Value) -> Result<Told, ConfigError> {
    translator.offload.queue_depth = Some(whole(translator, key, value, 1)?);
    later()
}

impl Translator<'_> {
    /// Sets `[offload]`, and says what has become of each of the keys. The stage is known by now.
    pub(super) fn finish_offload(&mut self) {
        let Offload { optimizer, parameters, block_bytes, queue_depth } = std::mem::take(&mut self.offload);
        let stage = self.out.config.stage;
        let offload = &mut self.out.config.offload;
        let optimizer_shares = if stage.shards_optimizer() { optimizer.shares() } else { TierShares::DEVICE };
        // Where DeepSpeed offloads the optimizer, gradients wait for it there.
        (offload.optimizer, offload.gradients) = (optimizer_shares, optimizer_shares);
        offload.parameters = if stage.shards_parameters() { parameters.shares() } else { TierShares::DEVICE };
        let is_on_disk = offload.nvme_key().is_some();
        let own = |path: &str| format!("{}/{OWN_DIRECTORY}", path.trim_end_matches('/'));
        let path = [&optimizer, &parameters].into_iter().find_map(|section| section.path.as_deref());
        let path = is_on_disk.then(|| own(path.unwrap_or(DEFAULT_PATH)));
        offload.nvme_path.clone_from(&path);
        let block_fits = |bytes: &usize| bytes.is_multiple_of(4096) && *bytes <= MOST_BLOCK_BYTES;
        let fitting = block_bytes.filter(block_fits).filter(|_| is_on_disk);
        if let Some(bytes) = fitting {
            offload.nvme_block_bytes = bytes;
        }
        if is_on_disk {
            let asked = queue_depth.map(|depth| depth.saturating_mul(offload.nvme_block_bytes));
            let bytes = asked.unwrap_or(offload.nvme_buffer_bytes).max(2 * offload.nvme_block_bytes);
            offload.nvme_buffer_bytes = bytes.min(isize::MAX as usize);
        }
        let (block_bytes, buffer_bytes) = (offload.nvme_block_bytes, offload.nvme_buffer_bytes);
        let whole_stage = stage.number();

        let told_tier = |keys: &[&str], shares: TierShares| {
            let place = match (shares.name(), shares.cpu > 0.0) {
                (Some(name), _) => format!("\"{name}\""),
                (None, true) => format!("{{ cpu = {:?} }}", shares.cpu),
                (None, false) => format!("{{ nvme = {:?} }}", shares.nvme),
            };
            keys.iter().map(|key| format!("offload.{key} = {place}")).collect::<Vec<_>>().join(", ")
        };
        let told_section = |section: &Section, shares: TierShares, keys: &[&str], needs: &str| match section.device {
            Device::None => (Fate::NotNeeded, "it is switched off".to_owned()),
            _ if shares == TierShares::DEVICE && section.share != Some(0.0) => {
                (Fate::NotNeeded, format!("it takes {needs}, there too, and the stage is {whole_stage}"))
            }
            _ => (Fate::Set, told_tier(keys, shares)),
        };
        let told_path = |section: &Section| match (&path, &section.path) {
            (Some(path), Some(given)) if *path == own(given) => {
                (Fate::Set, format!("offload.nvme_path = {path:?}, a directory of the run's own"))
            }
            (Some(path), Some(_)) => {
                (Fate::Missing, format!("all lies in one directory, offload.nvme_path = {path:?}"))
            }
            _ => (Fate::NotNeeded, "nothing lies on NVMe".to_owned()),
        };
        let told_share = |section: &Section, shares: TierShares| {
            let is_idle = shares == TierShares::DEVICE && section.share != Some(0.0);
            match is_idle || section.device == Device::None {
                true => (Fate::NotNeeded, "nothing is offloaded".to_owned()),
                false => (Fate::Set, "the share that is offloaded".to_owned()),
            }
        };
        let optimizer_keys = ["optimizer", "gradients"];
        let told = [
            ("cpu_offload", told_section(&optimizer, optimizer_shares, &optimizer_keys, "a stage from 1 on")),
            (
                "offload_optimizer.device",
                told_section(&optimizer, optimizer_shares, &optimizer_keys, "a stage from 1 on"),
            ),
            ("offload_optimizer.ratio", told_share(&optimizer, optimizer_shares)),
            ("offload_optimizer.nvme_path", told_path(&optimizer)),
            (
                "cpu_offload_params",
                told_section(&parameters, self.out.config.offload.parameters, &["parameters"], "stage 3"),
            ),
            (
                "offload_param.device",
                told_section(&parameters, self.out.config.offload.parameters, &["parameters"], "stage 3"),
            ),
            ("offload_param.nvme_path", told_path(&parameters)),
            (
                "offload_param.max_in_cpu",
                match self.out.config.offload.parameters.nvme > 0.0 {
                    true => (Fate::Missing, "what stays is a share: offload.parameters = { nvme = 0.8 }".to_owned()),
                    false => (Fate::NotNeeded, "parameters do not lie on NVMe".to_owned()),
                },
            ),
        ];
        for (key, told) in told {
            self.retell(&format!("zero_optimization.{key}"), told);
        }
        let on_disk = |told: Told| if is_on_disk { told } else { (Fate::NotNeeded, "nothing lies on NVMe".to_owned()) };
        let block = match fitting {
            Some(_) => (Fate::Set, format!("offload.nvme_block_bytes = {block_bytes}")),
            None => (Fate::Missing, format!("a block is a multiple of 4096 bytes, up to 1 GiB; here {block_bytes}")),
        };
        self.retell("aio.block_size", on_disk(block));
        let buffer = format!("offload.nvme_buffer_bytes = {buffer_bytes}, that many blocks and at least two");
        self.retell("aio.queue_depth", on_disk((Fate::Set, buffer)));
    }

    /// Says what has become of a key that could not be told when it was read.
    fn retell(&mut self, key: &str, (fate, told): Told) {
        // One that was filled in elsewhere has been told.
        let is_it = |item: &&mut TranslatedItem| item.key == key && item.fate == Fate::Set;
        if let Some(item) = self.out.items.iter_mut().find(is_it) {
            (item.fate, item.told) = (fate, told);
        }
    }
}

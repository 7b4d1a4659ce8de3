//! Files of weights, as other programs write them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use fsdp_core::ShardLayout;
use fsdp_core::checkpoint::{Checkpoint, Verify};

/// A directory of its own, removed at the end. In memory where the system has such a place, since tests save often.
#[derive(Debug)]
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let dir = parent.join(format!("fsdp-burn-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.clone()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Every tensor of a checkpoint in whole, and all that is not a tensor.
pub(crate) fn content(dir: &Path) -> (BTreeMap<String, Vec<u8>>, String) {
    let checkpoint = Checkpoint::open(dir, Verify::Checksums).unwrap();
    let manifest = checkpoint.manifest();
    let whole = |shape: &[usize]| ShardLayout::new(shape, 0, 1);
    let tensors = manifest.tensors.iter();
    let tensors = tensors.map(|t| (t.name.clone(), checkpoint.read(&t.name, &whole(&t.shape), 0).unwrap())).collect();
    (tensors, format!("{:?} {:?} {:?}", manifest.scalars, manifest.sections, manifest.step))
}

/// A tensor of a file: `kind` is the name of PyTorch's storage of its type, such as `Float`.
pub(crate) struct PytorchTensor {
    pub(crate) name: String,
    pub(crate) kind: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// Writes what `torch.save({"state_dict": tensors})` writes, or without the outer dictionary where `key` is `None`: a zip
/// archive of a pickle and the tensors' bytes.
pub(crate) fn write_pytorch(path: &Path, key: Option<&str>, tensors: &[PytorchTensor]) {
    let mut entries = vec![("archive/data.pkl".to_owned(), pickle(key, tensors))];
    for (number, tensor) in tensors.iter().enumerate() {
        entries.push((format!("archive/data/{number}"), tensor.bytes.clone()));
    }
    entries.push(("archive/byteorder".into(), b"little".to_vec()));
    entries.push(("archive/version".into(), b"3\n".to_vec()));
    fs::write(path, zip(&entries)).unwrap();
}

/// The pickle, in protocol 2: each tensor is a call of `_rebuild_tensor_v2` on a storage named by a persistent id.
fn pickle(key: Option<&str>, tensors: &[PytorchTensor]) -> Vec<u8> {
    let mut out = b"\x80\x02".to_vec();
    if let Some(key) = key {
        out.extend(b"}");
        text(&mut out, key);
    }
    out.extend(b"}(");
    for (number, tensor) in tensors.iter().enumerate() {
        text(&mut out, &tensor.name);
        out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        text(&mut out, "storage");
        out.extend(format!("ctorch\n{}Storage\n", tensor.kind).into_bytes());
        text(&mut out, &number.to_string());
        text(&mut out, "cpu");
        int(&mut out, tensor.shape.iter().product());
        out.extend(b"tQ");
        int(&mut out, 0);
        let stride = |dim: usize| tensor.shape[dim + 1..].iter().product();
        for numbers in [tensor.shape.clone(), (0..tensor.shape.len()).map(stride).collect()] {
            out.extend(b"(");
            numbers.into_iter().for_each(|number| int(&mut out, number));
            out.extend(b"t");
        }
        out.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    }
    out.extend(b"u");
    if key.is_some() {
        out.extend(b"s");
    }
    out.extend(b".");
    out
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

fn int(out: &mut Vec<u8>, number: usize) {
    out.push(b'J');
    out.extend((number as i32).to_le_bytes());
}

/// A zip archive without compression.
fn zip(entries: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes) in entries {
        let start = out.len() as u32;
        let mut common = Vec::new();
        // Version 2.0, no flags, stored, no time; checksum, two sizes, and the length of the name without extra fields.
        common.extend([20, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        for number in [crc32(bytes), bytes.len() as u32, bytes.len() as u32] {
            common.extend(number.to_le_bytes());
        }
        common.extend((name.len() as u16).to_le_bytes());
        common.extend([0, 0]);
        out.extend(b"PK\x03\x04");
        out.extend(&common);
        out.extend(name.as_bytes());
        out.extend(bytes);
        directory.extend(b"PK\x01\x02\x14\x00");
        directory.extend(&common);
        directory.extend([0; 10]);
        directory.extend(start.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let (start, count) = (out.len() as u32, entries.len() as u16);
    out.extend(&directory);
    out.extend(b"PK\x05\x06\x00\x00\x00\x00");
    out.extend(count.to_le_bytes());
    out.extend(count.to_le_bytes());
    out.extend((directory.len() as u32).to_le_bytes());
    out.extend(start.to_le_bytes());
    out.extend([0, 0]);
    out
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { (crc >> 1) ^ 0xEDB8_8320 } else { crc >> 1 };
    !bytes.iter().fold(!0u32, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), step))
}

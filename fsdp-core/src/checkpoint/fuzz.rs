//! Targets for a fuzzer: what the parsers of a checkpoint's files promise for any bytes. See
//! [`testing::fuzz`](crate::testing::fuzz).

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::disk::Checksum;
use super::header::{FileTensor, Header, header_bytes};
use super::manifest::{FileEntry, Manifest, Piece, TensorEntry, TensorKind};
use super::plain::parse_index;
use super::reshard::{Cut, runs};
use super::{PRODUCER, StoredDtype};
use crate::{Mesh, ShardLayout, Stage};

/// A manifest that is accepted prints as itself, and whatever it says of its tensors can be read without an overflow. The
/// bytes are tried as the file, and as the text inside an envelope with the right checksum, which random bytes would not
/// find.
///
/// # Panics
/// If that does not hold.
pub fn manifest(bytes: &[u8]) {
    let path = Path::new("manifest.json");
    for text in [bytes.to_vec(), sealed(bytes)] {
        let Ok(manifest) = Manifest::parse(&text, path) else { continue };
        let printed = manifest.to_text().expect("what was parsed can be printed");
        let again = Manifest::parse(printed.as_bytes(), path).expect("what was printed can be parsed");
        assert_eq!(again, manifest);
        manifest.tensors.iter().for_each(readable);
    }
}

/// Blocks of the tensor come from its pieces, each element once, and lie inside of them.
fn readable(tensor: &TensorEntry) {
    assert!(tensor.full_bytes() <= isize::MAX as u64);
    let layout = ShardLayout::new(&tensor.shape, 0, 3);
    for shard_index in 0..layout.num_shards() {
        let target = Cut::block(&layout, shard_index);
        let mut len = 0;
        for piece in &tensor.pieces {
            let source = Cut { dim: tensor.dim, rows: piece.start..piece.end };
            let piece_len: usize = tensor.piece_shape(piece).iter().product();
            // Of a tensor with more rows than a file could have, some are enough.
            for run in runs(&tensor.shape, &source, &target).take(1000) {
                assert!(run.source + run.len <= piece_len && run.target + run.len <= layout.shard_len(shard_index));
                len += run.len;
            }
        }
        assert!(len <= layout.shard_len(shard_index));
    }
}

/// A header that is accepted has every tensor inside of the file, once, and finds it again. The first 4 bytes are the bytes
/// of data that the file has.
///
/// # Panics
/// If that does not hold.
pub fn header(bytes: &[u8]) {
    let Some((size, text)) = bytes.split_first_chunk::<4>() else { return };
    let file_bytes = 8 + text.len() as u64 + u64::from(u32::from_le_bytes(*size));
    let Ok(header) = Header::parse(text, file_bytes, Path::new("rank-00000.safetensors")) else { return };
    let metadata = header.metadata();
    let mut end = 0;
    for name in metadata.offset_keys() {
        let info = metadata.info(&name).expect("it was listed");
        assert_eq!(info.data_offsets.0, end, "tensors follow each other");
        end = info.data_offsets.1;
        let Some(dtype) = StoredDtype::of_safetensors(info.dtype) else { continue };
        let tensor = FileTensor { name: &name, dtype, shape: info.shape.clone() };
        let start = header.find(&tensor).expect("the header has what it lists");
        assert!(start + tensor.num_bytes() as u64 <= file_bytes);
    }
    assert!(8 + text.len() as u64 + end as u64 <= file_bytes);
}

/// An index that is accepted names files beside it and no others.
///
/// # Panics
/// If that does not hold.
pub fn index(bytes: &[u8]) {
    let Ok(index) = parse_index(bytes) else { return };
    for file in index.weight_map.values() {
        let path = Path::new("weights").join(file);
        assert_eq!(path.parent(), Some(Path::new("weights")), "{file:?}");
        assert!(path.file_name().is_some(), "{file:?}");
    }
}

/// Inputs that are accepted, for [`manifest`], [`header`] and [`index`], from which a fuzzer may begin.
///
/// # Panics
/// Never: what they are made of is in this function.
pub fn seeds() -> [Vec<u8>; 3] {
    let file = |name: &str| FileEntry { name: name.into(), bytes: 64, checksum: Checksum::of(name.as_bytes()) };
    let tensor = TensorEntry {
        name: "a.weight".into(),
        aliases: vec!["b.weight".into()],
        kind: TensorKind::Optimizer,
        dtype: StoredDtype::Bf16,
        shape: vec![5, 7],
        dim: 0,
        pieces: vec![Piece { file: 0, start: 0, end: 3 }, Piece { file: 1, start: 3, end: 5 }],
    };
    let manifest = Manifest {
        step: 100,
        world_size: 2,
        mesh: Mesh::one_dim(2),
        stage: Stage::Parameters,
        files: vec![file("rank-00000.safetensors"), file("rank-00001.safetensors")],
        tensors: vec![tensor],
        scalars: BTreeMap::from([("time".into(), 0.1.into())]),
        sections: BTreeMap::from([("config".into(), "stage = 3".into())]),
        ranks: vec![Value::Null, 7.into()],
    };
    let tensor = |name, dtype, shape: &[usize]| FileTensor { name, dtype, shape: shape.to_vec() };
    let tensors = [
        tensor("a", StoredDtype::F64, &[2, 3]),
        tensor("b.weight", StoredDtype::Bf16, &[5]),
        tensor("empty", StoredDtype::F32, &[0, 7]),
        tensor("scalar", StoredDtype::U8, &[]),
    ];
    let notes = BTreeMap::from([("producer".to_owned(), PRODUCER.to_owned())]);
    let header = header_bytes(&tensors, &notes, Path::new("a")).expect("the names and sizes above are good");
    let data_bytes: usize = tensors.iter().map(FileTensor::num_bytes).sum();
    [
        serde_json::to_vec(&manifest).expect("a manifest is plain data"),
        [&(data_bytes as u32).to_le_bytes()[..], &header[8..]].concat(),
        br#"{"metadata":{"total_size":9},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"m.safetensors"}}"#
            .to_vec(),
    ]
}

/// The file of a manifest with this text.
fn sealed(manifest: &[u8]) -> Vec<u8> {
    let checksum = Checksum::of(manifest);
    let start = format!(r#"{{"format_version":1,"checksum":"{checksum}","manifest":"#);
    [start.as_bytes(), manifest, b"}"].concat()
}

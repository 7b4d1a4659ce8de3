//! The header of a `safetensors` file: 8 bytes of length, then JSON with the place of every tensor.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, Value};

use super::{CheckpointError, StoredDtype};

/// What readers of the format accept at most.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes of the length before the header.
const LENGTH_BYTES: u64 = 8;

/// Where the tensors of one file lie.
#[derive(Clone, Debug)]
pub(super) struct Header {
    /// Where data begins in the file.
    data_start: u64,
    metadata: Metadata,
}

/// A tensor in a file that is to be written.
#[derive(Clone, Debug)]
pub(super) struct FileTensor<'a> {
    pub(super) name: &'a str,
    pub(super) dtype: StoredDtype,
    pub(super) shape: Vec<usize>,
}

impl FileTensor<'_> {
    pub(super) fn num_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size_bytes()
    }
}

/// The header of a file that holds `tensors` in this order, with the length before it. Data follows at once, aligned to
/// 8 bytes. `path` is for errors.
pub(super) fn header_bytes(
    tensors: &[FileTensor<'_>],
    metadata: &BTreeMap<String, String>,
    path: &Path,
) -> Result<Vec<u8>, CheckpointError> {
    let broken = |problem: String| CheckpointError::Header { file: path.to_owned(), problem };
    let json = |error: serde_json::Error| broken(error.to_string());
    let mut header = Map::new();
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.num_bytes();
        let info = TensorInfo {
            dtype: tensor.dtype.to_safetensors(),
            shape: tensor.shape.clone(),
            data_offsets: (start, end),
        };
        header.insert(tensor.name.to_owned(), serde_json::to_value(info).map_err(json)?);
        start = end;
    }
    // A tensor of this name could not be told from the metadata.
    let metadata: Map<String, Value> = metadata.iter().map(|(key, text)| (key.clone(), text.clone().into())).collect();
    if header.insert("__metadata__".into(), metadata.into()).is_some() {
        return Err(broken("a tensor is called `__metadata__`, which the format reserves".into()));
    }
    let mut text = serde_json::to_vec(&header).map_err(json)?;
    text.resize(text.len().next_multiple_of(LENGTH_BYTES as usize), b' ');
    if text.len() as u64 > MAX_HEADER_BYTES {
        return Err(broken(format!("{} bytes, where readers take at most {MAX_HEADER_BYTES}", text.len())));
    }
    Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
}

impl Header {
    /// Reads and checks the header of an open file. Allocates no more than the file has.
    pub(super) fn read(file: &File, path: &Path) -> Result<Self, CheckpointError> {
        let file_bytes = file.metadata().map_err(CheckpointError::io("look at", path))?.len();
        let mut length = [0; LENGTH_BYTES as usize];
        file.read_exact_at(&mut length, 0).map_err(CheckpointError::io("read the header of", path))?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER_BYTES || length > file_bytes {
            let problem = format!("it claims {length} bytes in a file of {file_bytes}");
            return Err(CheckpointError::Header { file: path.to_owned(), problem });
        }
        let mut text = vec![0; length as usize];
        file.read_exact_at(&mut text, LENGTH_BYTES).map_err(CheckpointError::io("read the header of", path))?;
        Self::parse(&text, file_bytes, path)
    }

    /// `text` is the JSON of a file of `file_bytes`; `path` is for errors.
    pub(super) fn parse(text: &[u8], file_bytes: u64, path: &Path) -> Result<Self, CheckpointError> {
        let damaged = |problem: String| CheckpointError::Header { file: path.to_owned(), problem };
        let metadata: Metadata = serde_json::from_slice(text).map_err(|error| damaged(error.to_string()))?;
        let data_start = LENGTH_BYTES + text.len() as u64;
        match data_start.checked_add(metadata.data_len() as u64) {
            Some(expected) if expected == file_bytes => Ok(Self { data_start, metadata }),
            _ => Err(damaged(format!(
                "it describes {} bytes of tensors behind byte {data_start}, in a file of {file_bytes}",
                metadata.data_len()
            ))),
        }
    }

    /// Names, types and shapes, and what the file notes beside them.
    pub(super) fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Where a tensor begins in the file, or what is wrong with it.
    pub(super) fn find(&self, tensor: &FileTensor<'_>) -> Result<u64, String> {
        let name = tensor.name;
        let Some(info) = self.metadata.info(name) else {
            return Err(format!("it does not have `{name}`, which the manifest says it has"));
        };
        let TensorInfo { dtype, shape, data_offsets: (start, _) } = info;
        if *dtype != tensor.dtype.to_safetensors() || *shape != tensor.shape {
            return Err(format!(
                "`{name}` is {dtype} {shape:?} in the header and {} {:?} in the manifest",
                tensor.dtype, tensor.shape
            ));
        }
        // Offsets have been checked against the size of the file, so the sum does not overflow.
        Ok(self.data_start + *start as u64)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn valid() -> (Vec<u8>, u64) {
        let tensor = |name, dtype, shape: &[usize]| FileTensor { name, dtype, shape: shape.to_vec() };
        let tensors = [
            tensor("a", StoredDtype::F64, &[2, 3]),
            tensor("b.weight", StoredDtype::Bf16, &[5]),
            tensor("empty", StoredDtype::F32, &[0, 7]),
            tensor("scalar", StoredDtype::U8, &[]),
        ];
        let metadata = BTreeMap::from([("step".to_owned(), "7".to_owned())]);
        let bytes = header_bytes(&tensors, &metadata, Path::new("a")).unwrap();
        let file_bytes = bytes.len() as u64 + tensors.iter().map(|tensor| tensor.num_bytes() as u64).sum::<u64>();
        (bytes[8..].to_vec(), file_bytes)
    }

    #[test]
    fn a_header_reads_back_and_is_aligned() {
        let (text, file_bytes) = valid();
        let header = Header::parse(&text, file_bytes, Path::new("a")).unwrap();
        assert!(header.data_start.is_multiple_of(8));
        let b = FileTensor { name: "b.weight", dtype: StoredDtype::Bf16, shape: vec![5] };
        assert_eq!(header.find(&b), Ok(header.data_start + 48));
        let longer = FileTensor { shape: vec![6], ..b };
        let expected = "`b.weight` is BF16 [5] in the header and BF16 [6] in the manifest";
        assert_eq!(header.find(&longer), Err(expected.to_owned()));
    }

    #[test]
    fn a_header_that_claims_other_sizes_is_refused() {
        let (text, file_bytes) = valid();
        for wrong in [0, file_bytes - 1, file_bytes + 1, u64::MAX] {
            assert!(Header::parse(&text, wrong, Path::new("a")).is_err());
        }
        let huge = format!(r#"{{"a":{{"dtype":"F64","shape":[{0},{0}],"data_offsets":[0,{0}]}}}}"#, u64::MAX);
        let end = format!(r#"{{"a":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, u64::MAX);
        for text in [huge, end] {
            assert!(Header::parse(text.as_bytes(), 100, Path::new("a")).is_err());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_bytes_make_the_parser_panic(text in proptest::collection::vec(any::<u8>(), 0..200), size in any::<u64>()) {
            let _ = Header::parse(&text, size, Path::new("a"));
        }

        #[test]
        fn no_change_of_a_valid_header_makes_the_parser_panic(
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            cut in any::<prop::sample::Index>(),
            is_cut in any::<bool>(),
        ) {
            let (mut text, file_bytes) = valid();
            for (at, byte) in changes {
                let at = at.index(text.len());
                text[at] = byte;
            }
            if is_cut {
                text.truncate(cut.index(text.len()));
            }
            if let Ok(header) = Header::parse(&text, file_bytes, Path::new("a")) {
                prop_assert!(header.metadata.data_len() as u64 <= file_bytes);
            }
        }
    }
}

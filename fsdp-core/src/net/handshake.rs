//! How two processes prove to each other that they belong to one run, as bytes.
//!
//! ```text
//!   joining                                     listening
//!   greeting, nonce            ------------->
//!                              <-------------   greeting, nonce
//!   world size, rank, proof    ------------->
//!                              <-------------   verdict, proof
//! ```
//!
//! A greeting is a magic number and a version. A proof is HMAC-SHA256 over a word for the direction, what the connection is
//! for, both nonces and the numbers, with the run's secret as key: no proof fits another connection, and the secret itself is
//! never sent. What follows is neither encrypted nor signed; where others can write into connections, use a network of your own.
//! All sizes are fixed, so nothing that is sent can make the listener hold more than [`JOIN_BYTES`].

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::{Refusal, Secret};

const MAGIC: [u8; 4] = *b"FSDP";
pub(super) const VERSION: u16 = 2;
const NONCE_BYTES: usize = 32;
const PROOF_BYTES: usize = 32;
/// Greeting and nonce, of either side.
pub(super) const HELLO_BYTES: usize = 4 + 2 + NONCE_BYTES;
/// World size, rank and proof.
pub(super) const CLAIM_BYTES: usize = 4 + 4 + PROOF_BYTES;
/// All that the joining side sends.
pub(super) const JOIN_BYTES: usize = HELLO_BYTES + CLAIM_BYTES;
/// Verdict and proof.
pub(super) const VERDICT_BYTES: usize = 1 + PROOF_BYTES;

type Nonce = [u8; NONCE_BYTES];

/// What both sides know of a connection before they trust each other.
#[derive(Clone, Debug)]
pub(crate) struct Terms<'a> {
    pub(super) secret: &'a Secret,
    /// What the connection is for, so that one cannot be passed off as another.
    pub(super) purpose: &'a str,
    pub(super) world_size: usize,
}

pub(super) fn nonce() -> std::io::Result<Nonce> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|error| std::io::Error::other(error.to_string()))?;
    Ok(nonce)
}

/// Greeting and nonce.
pub(super) fn hello(nonce: &Nonce) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_le_bytes(), nonce].concat()
}

/// The nonce of a greeting, as soon as as many bytes are there.
pub(super) fn read_hello(bytes: &[u8]) -> Result<Option<Nonce>, Refusal> {
    let magic = &bytes[..bytes.len().min(MAGIC.len())];
    if !MAGIC.starts_with(magic) {
        return Err(Refusal::NotOurs);
    }
    let Some((&version, nonce)) = bytes[magic.len()..].split_first_chunk() else { return Ok(None) };
    match u16::from_le_bytes(version) {
        VERSION => Ok(nonce.first_chunk().copied()),
        other => Err(Refusal::Version(other)),
    }
}

impl Terms<'_> {
    /// What the joining side says of itself.
    pub(super) fn claim(&self, rank: usize, ours: &Nonce, theirs: &Nonce) -> Vec<u8> {
        let numbers = numbers(self.world_size, rank);
        let proof = self.mac("joining", ours, theirs, &numbers).finalize().into_bytes();
        [&numbers[..], &proof].concat()
    }

    /// The rank of whoever joins, if it knows the secret and is one of `expected`.
    pub(super) fn check_claim(
        &self,
        claim: &[u8; CLAIM_BYTES],
        theirs: &Nonce,
        ours: &Nonce,
        is_expected: impl Fn(usize) -> Result<(), Refusal>,
    ) -> Result<usize, Refusal> {
        let (numbers, proof) = claim.split_at(8);
        let mac = self.mac("joining", theirs, ours, numbers);
        mac.verify_slice(proof).map_err(|_| Refusal::Secret)?;
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte));
        let (world_size, rank) = (number(&numbers[..4]), number(&numbers[4..]));
        if world_size != self.world_size {
            return Err(Refusal::WorldSize);
        }
        is_expected(rank)?;
        Ok(rank)
    }

    /// The listener's answer.
    pub(super) fn verdict(&self, verdict: Result<usize, Refusal>, theirs: &Nonce, ours: &Nonce) -> Vec<u8> {
        let code = [code(verdict.err())];
        // Whoever does not know the secret gets no proof of ours.
        let proof = match verdict {
            Err(Refusal::Secret | Refusal::NotOurs | Refusal::Version(_)) => [0; PROOF_BYTES].into(),
            _ => self.mac("listening", theirs, ours, &code).finalize().into_bytes(),
        };
        [&code[..], &proof].concat()
    }

    /// Whether the joining side has been let in, by somebody who knows the secret.
    pub(super) fn read_verdict(
        &self,
        verdict: &[u8; VERDICT_BYTES],
        ours: &Nonce,
        theirs: &Nonce,
    ) -> Result<(), Refusal> {
        let (code_bytes, proof) = verdict.split_at(1);
        let refusal = REFUSALS.into_iter().find(|&refusal| code(Some(refusal)) == code_bytes[0]);
        let is_proved = self.mac("listening", ours, theirs, code_bytes).verify_slice(proof).is_ok();
        match refusal {
            None if is_proved && code_bytes[0] == 0 => Ok(()),
            Some(refusal) if is_proved => Err(refusal),
            _ => Err(Refusal::Secret),
        }
    }

    fn mac(&self, side: &str, joining: &Nonce, listening: &Nonce, numbers: &[u8]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.secret.bytes()).expect("a key of any length will do");
        for part in [side.as_bytes(), self.purpose.as_bytes(), joining, listening, numbers] {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

const REFUSALS: [Refusal; 4] = [Refusal::Secret, Refusal::WorldSize, Refusal::Rank, Refusal::Duplicate];

fn code(refusal: Option<Refusal>) -> u8 {
    match refusal {
        None => 0,
        Some(Refusal::Secret | Refusal::NotOurs | Refusal::Version(_)) => 1,
        Some(Refusal::WorldSize) => 2,
        Some(Refusal::Rank) => 3,
        Some(Refusal::Duplicate) => 4,
    }
}

fn numbers(world_size: usize, rank: usize) -> [u8; 8] {
    let mut numbers = [0; 8];
    numbers[..4].copy_from_slice(&(world_size as u32).to_le_bytes());
    numbers[4..].copy_from_slice(&(rank as u32).to_le_bytes());
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(joining: &Terms, listening: &Terms, rank: usize) -> (Result<usize, Refusal>, Result<(), Refusal>) {
        let (ours, theirs) = (nonce().unwrap(), nonce().unwrap());
        assert_eq!(read_hello(&hello(&ours)), Ok(Some(ours)));
        let claim: [u8; CLAIM_BYTES] = joining.claim(rank, &ours, &theirs).try_into().unwrap();
        let expected = |rank| match rank {
            1 => Ok(()),
            2 => Err(Refusal::Duplicate),
            _ => Err(Refusal::Rank),
        };
        let verdict = listening.check_claim(&claim, &ours, &theirs, expected);
        let answer = listening.verdict(verdict, &ours, &theirs).try_into().unwrap();
        (verdict, joining.read_verdict(&answer, &ours, &theirs))
    }

    #[test]
    fn both_sides_agree_whether_a_rank_is_let_in_and_why_not() {
        let (secret, other) = (Secret::new([1; 16]).unwrap(), Secret::new([2; 16]).unwrap());
        let terms = Terms { secret: &secret, purpose: "control", world_size: 3 };
        assert_eq!(joined(&terms, &terms, 1), (Ok(1), Ok(())));
        for (joining, rank, refusal) in [
            (terms.clone(), 2, Refusal::Duplicate),
            (terms.clone(), 3, Refusal::Rank),
            (Terms { world_size: 4, ..terms.clone() }, 1, Refusal::WorldSize),
            (Terms { secret: &other, ..terms.clone() }, 1, Refusal::Secret),
            (Terms { purpose: "data", ..terms.clone() }, 1, Refusal::Secret),
        ] {
            assert_eq!(joined(&joining, &terms, rank), (Err(refusal), Err(refusal)));
        }
    }

    #[test]
    fn a_listener_without_the_secret_is_not_believed() {
        let (secret, other) = (Secret::new([1; 16]).unwrap(), Secret::new([2; 16]).unwrap());
        let ours = Terms { secret: &secret, purpose: "control", world_size: 2 };
        let impostor = Terms { secret: &other, ..ours.clone() };
        let (a, b) = (nonce().unwrap(), nonce().unwrap());
        let verdict = impostor.verdict(Ok(1), &a, &b).try_into().unwrap();
        assert_eq!(ours.read_verdict(&verdict, &a, &b), Err(Refusal::Secret));
        let verdict = ours.verdict(Ok(1), &a, &b).try_into().unwrap();
        assert_eq!(ours.read_verdict(&verdict, &b, &a), Err(Refusal::Secret), "of another connection");
    }

    #[test]
    fn what_is_not_a_greeting_is_refused_at_its_first_wrong_byte() {
        let ours = hello(&[7; NONCE_BYTES]);
        for len in 0..HELLO_BYTES {
            assert_eq!(read_hello(&ours[..len]), Ok(None), "{len} bytes");
        }
        assert_eq!(read_hello(b"G"), Err(Refusal::NotOurs));
        assert_eq!(read_hello(b"FSDQ"), Err(Refusal::NotOurs));
        let other = [&b"FSDP"[..], &(VERSION + 1).to_le_bytes()].concat();
        assert_eq!(read_hello(&other), Err(Refusal::Version(VERSION + 1)));
    }

    #[test]
    fn a_secret_is_long_enough_and_never_printed() {
        assert!(matches!(Secret::new("short"), Err(RendezvousError::NoSecret { .. })));
        let error = Secret::of_variable(None).unwrap_err().to_string();
        assert!(error.contains("FSDP_SECRET is not set") && error.contains("openssl rand"), "{error}");
        assert_eq!(format!("{:?}", Secret::of_variable(Some("sixteen bytes at least")).unwrap()), "Secret(..)");
        assert_ne!(Secret::random().unwrap().bytes(), Secret::random().unwrap().bytes());
    }

    use super::super::RendezvousError;
}

//! The command `fsdp`.

fn main() {}

//! What the command prints. Whoever reads it may stop early, as `head` does, which is no error.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::process;

/// As `print!`, for a reader that may be gone.
macro_rules! put {
    ($($part:tt)*) => { crate::output::write(format_args!($($part)*)) };
}

/// As `println!`, for a reader that may be gone.
macro_rules! putln {
    ($($part:tt)*) => { crate::output::write(format_args!("{}\n", format_args!($($part)*))) };
}

pub(crate) use {put, putln};

/// Writes to standard output. A reader that is gone has seen enough: the command goes on, to its own exit code. What else goes
/// wrong, as on a full disk, ends it.
pub(crate) fn write(text: Arguments<'_>) {
    let mut output = io::stdout().lock();
    match output.write_fmt(text).and_then(|()| output.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            eprintln!("error: standard output cannot be written: {error}; free its disk, or send it elsewhere");
            process::exit(1);
        }
        _ => {}
    }
}

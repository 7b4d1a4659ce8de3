//! The command `fsdp`: what there is to do with checkpoints outside of a training program.
//!
//! Exit codes: 0 where all is well, 1 where something failed or is damaged, 2 for a command that cannot be understood.

mod consolidate;
mod inspect;
mod size;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Sharded training for Burn: tools.
#[derive(Parser)]
#[command(name = "fsdp", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Consolidate(consolidate::Consolidate),
    Inspect(inspect::Inspect),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Consolidate(command) => command.run(),
        Command::Inspect(command) => command.run(),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

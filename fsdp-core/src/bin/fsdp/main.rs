//! The command `fsdp`: what there is to do before and after a training program.
//!
//! Exit codes: 0 where all is well, 1 where something failed, is damaged or differs, 2 for a command that cannot be
//! understood.

mod bench;
mod config;
mod consolidate;
mod inspect;
mod machine;
mod model;
mod number;
mod output;
mod page;
mod plan;
mod rate;
mod shell;
mod simulate;
mod size;
mod tiers;
mod words;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Sharded training for Burn: tools
#[derive(Parser)]
#[command(name = "fsdp", version, arg_required_else_help = true, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Plan(Box<plan::Plan>),
    Simulate(Box<simulate::Simulate>),
    Bench(bench::Bench),
    Config(config::ConfigCommand),
    Inspect(inspect::Inspect),
    Consolidate(consolidate::Consolidate),
    Completions(shell::Completions),
    Man(shell::Man),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Plan(command) => command.run(),
        Command::Simulate(command) => command.run(),
        Command::Bench(command) => command.run(),
        Command::Config(command) => command.run(),
        Command::Inspect(command) => command.run(),
        Command::Consolidate(command) => command.run(),
        Command::Completions(command) => command.run(Cli::command()),
        Command::Man(command) => command.run(Cli::command()),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

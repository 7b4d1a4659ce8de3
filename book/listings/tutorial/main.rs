//! The programs of the tutorial, one for each chapter: `cargo tutorial NAME`, from the root of the repository.

mod collectives;
mod ddp;
mod memory;
mod mesh;
mod model;
mod offload;
mod overlap;
mod plan;
mod precision;
mod resume;
mod scaling;
mod show;
mod train;
mod units;
mod zero;

use std::error::Error;
use std::process::ExitCode;

use peak_alloc::PeakAlloc;

/// Counts what the process has allocated.
#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// What a chapter's program returns.
type Outcome = Result<(), Box<dyn Error>>;

struct Chapter {
    name: &'static str,
    shows: &'static str,
    run: fn() -> Outcome,
}

const CHAPTERS: [Chapter; 12] = [
    Chapter { name: "memory", shows: "what a parameter costs on one device", run: memory::run },
    Chapter { name: "ddp", shows: "data parallel, and what every rank holds again", run: ddp::run },
    Chapter { name: "zero", shows: "the same model at stages 0, 1, 2 and 3", run: zero::run },
    Chapter { name: "units", shows: "what gathers when", run: units::run },
    Chapter { name: "collectives", shows: "what collectives do, and what they cost here", run: collectives::run },
    Chapter { name: "overlap", shows: "a slow network, with and without prefetch", run: overlap::run },
    Chapter { name: "mesh", shows: "ranks as a grid, and which rows they own", run: mesh::run },
    Chapter { name: "precision", shows: "bf16 beside float32", run: precision::run },
    Chapter { name: "offload", shows: "state on the disk", run: offload::run },
    Chapter { name: "resume", shows: "a checkpoint of four ranks, read by others", run: resume::run },
    Chapter { name: "scaling", shows: "a step on 8 to 4096 GPUs, simulated", run: scaling::run },
    Chapter { name: "plan", shows: "a model's sizes, for the command fsdp", run: plan::run },
];

fn main() -> ExitCode {
    let name = std::env::args().nth(1).unwrap_or_default();
    let Some(chapter) = CHAPTERS.iter().find(|chapter| chapter.name == name) else {
        println!("cargo tutorial NAME, where NAME is one of");
        for Chapter { name, shows, .. } in CHAPTERS {
            println!("  {name:<12} {shows}");
        }
        return if name.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(2) };
    };
    match (chapter.run)() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

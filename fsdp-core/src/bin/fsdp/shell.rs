//! `fsdp completions` and `fsdp man`: what a shell and a reader of manuals need, written from the options themselves.

use std::error::Error;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use clap_complete::Shell;

use crate::output::{put, putln};

/// Print the completions for a shell
///
/// For bash: fsdp completions bash > ~/.local/share/bash-completion/completions/fsdp
#[derive(Args)]
pub(crate) struct Completions {
    /// The shell
    shell: Shell,
}

impl Completions {
    pub(crate) fn run(self, mut command: clap::Command) -> Result<ExitCode, Box<dyn Error>> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "fsdp", &mut script);
        put!("{}", String::from_utf8_lossy(&script));
        Ok(ExitCode::SUCCESS)
    }
}

/// Print the manual page, or write a page for each subcommand
#[derive(Args)]
pub(crate) struct Man {
    /// Folder for fsdp.1, fsdp-plan.1 and so on
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl Man {
    pub(crate) fn run(self, command: clap::Command) -> Result<ExitCode, Box<dyn Error>> {
        let Some(dir) = self.out else {
            let mut page = Vec::new();
            clap_mangen::Man::new(command).render(&mut page)?;
            put!("{}", String::from_utf8_lossy(&page));
            return Ok(ExitCode::SUCCESS);
        };
        let failed = |error| format!("--out: {}: {error}; name a folder that exists", dir.display());
        if !dir.is_dir() {
            return Err(failed(io::Error::from(io::ErrorKind::NotADirectory)).into());
        }
        clap_mangen::generate_to(command, &dir).map_err(failed)?;
        let mut pages: Vec<_> =
            fs::read_dir(&dir).map_err(failed)?.filter_map(|entry| Some(entry.ok()?.path())).collect();
        pages.retain(|page| page.extension().is_some_and(|extension| extension == "1"));
        pages.sort();
        pages.iter().for_each(|page| putln!("{}", page.display()));
        Ok(ExitCode::SUCCESS)
    }
}

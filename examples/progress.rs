//! How far a run is: a bar on a terminal, plain lines elsewhere.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

/// Shows the steps of a run, on one rank.
pub struct Progress {
    display: Display,
    num_steps: usize,
}

/// What a step tells.
#[derive(Clone, Copy, Debug)]
pub struct StepNews {
    /// The step, from 0.
    pub step: usize,
    /// Mean loss over all ranks.
    pub loss: f64,
    /// Tokens of all ranks, by the time since the start.
    pub tokens_per_second: f64,
    /// Share of the time, 0 to 1, that this rank stood still for communication.
    pub waiting: f64,
}

enum Display {
    Nothing,
    Lines { every: usize },
    Bar(ProgressBar),
}

impl Progress {
    /// For `num_steps` steps; a quiet one shows nothing.
    pub fn new(num_steps: usize, quiet: bool) -> Self {
        let display = match quiet {
            true => Display::Nothing,
            false if std::io::stderr().is_terminal() => Display::Bar(bar(num_steps)),
            false => Display::Lines { every: num_steps.div_ceil(20) },
        };
        Self { display, num_steps }
    }

    /// One step is done.
    pub fn step(&self, news: StepNews) {
        let StepNews { step, loss, tokens_per_second, waiting } = news;
        let text = format!("loss {loss:.4}   {tokens_per_second:.0} tokens/s   communication {:.0}%", 100.0 * waiting);
        match &self.display {
            Display::Nothing => {}
            Display::Bar(bar) => {
                bar.set_message(text);
                bar.inc(1);
            }
            Display::Lines { every } => {
                if step.is_multiple_of(*every) || step + 1 == self.num_steps {
                    println!("step {:>5} of {}   {text}", step + 1, self.num_steps);
                }
            }
        }
    }

    /// All steps are done.
    pub fn finish(&self) {
        if let Display::Bar(bar) = &self.display {
            bar.finish();
        }
    }
}

fn bar(num_steps: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:32} {pos:>4}/{len}  {msg}  {eta} left");
    ProgressBar::new(num_steps as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

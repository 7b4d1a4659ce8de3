//! What Burn's learner shows: one line for each epoch.

use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::{MetricDefinition, MetricId, NumericEntry};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation, MetricsRendererTraining,
};

/// Prints the metrics of each epoch, once they are final.
#[derive(Debug, Default)]
pub struct EpochLines {
    names: Vec<(MetricId, String)>,
    /// Of the epoch that runs.
    line: Vec<String>,
}

impl EpochLines {
    fn note(&mut self, split: &str, state: &MetricState) {
        let MetricState::Numeric(entry, Some(NumericEntry::Final(value))) = state else { return };
        if let Some((_, name)) = self.names.iter().find(|(id, _)| *id == entry.metric_id) {
            self.line.push(format!("{split} {} {value:.4}", name.to_lowercase()));
        }
    }
}

impl MetricsRendererTraining for EpochLines {
    fn update_train(&mut self, state: MetricState) {
        self.note("training", &state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.note("validation", &state);
    }
}

impl TrainingProgressLogger for EpochLines {
    fn start(&mut self, _: usize, _: usize, _: Option<usize>, _: Option<&str>) {}

    fn update_epoch(&mut self, epoch: usize) {
        println!("epoch {epoch:>2}  {}", self.line.join("  "));
        self.line.clear();
    }

    fn start_split(&mut self, _: &str, _: usize) {}

    fn update_split(&mut self, _: usize) {}

    fn end_split(&mut self) {}

    fn end(&mut self) {}

    fn log_event_training(&mut self, _: String) {}
}

impl MetricsRenderer for EpochLines {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names.push((definition.metric_id.clone(), definition.name.to_string()));
    }
}

impl MetricsRendererEvaluation for EpochLines {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
}

impl EvaluationProgressLogger for EpochLines {
    fn start_global_progress(&mut self, _: usize) {}

    fn start_test(&mut self, _: &str, _: usize) {}

    fn update_test_progress(&mut self, _: usize) {}

    fn end_test(&mut self) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _: String) {}
}

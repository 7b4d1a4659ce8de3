//! Sharded training gives what plain training gives.

use fsdp_burn::{Config, Stage};

use crate::common::models::Mlp;
use crate::common::run::{Optimizer, assert_parity, plain, sharded};

#[test]
fn smoke() {
    for optimizer in [Optimizer::Sgd, Optimizer::AdamW] {
        let expected = plain::<Mlp>(optimizer);
        for stage in Stage::ALL {
            for world_size in [1, 2, 3, 5] {
                let config = Config { stage, world_size, timeout_s: 20.0, ..Config::default() };
                let got = sharded::<Mlp>(&config, optimizer);
                assert_parity(&format!("{stage} on {world_size}"), &expected, &got, 1e-5, 1e-4);
            }
        }
    }
}

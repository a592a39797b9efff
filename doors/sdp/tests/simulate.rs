//! Long random runs of two endpoints: every byte arrives, in order, as it was when it was sent, and everything comes to rest.
//!
//! `WEFT_SEED=N` repeats a run.

mod world;

use world::{Call, Fault, Settings, World};

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 33) % n
    }
}

fn step(world: &mut World, rng: &mut Rng) -> Result<(), Fault> {
    let at = rng.below(2) as usize;
    let most = if rng.below(8) == 0 { 6000 } else { 9 };
    let len = 1 + rng.below(most) as u32;
    let call = match rng.below(16) {
        0..3 => Call::Send(len),
        3 => Call::SendNow(len),
        4 | 5 => Call::Source(len),
        6 => Call::Overwrite,
        7..10 => Call::Recv(len),
        10 => Call::OfferSink(len),
        11 => Call::CancelSink,
        12 => {
            world.transmitted(at);
            return Ok(());
        }
        13 => {
            world.lock(at);
            return Ok(());
        }
        14 => return world.deliver(at),
        _ => return world.poll(at).map(drop),
    };
    if world.may(at, call) {
        world.call(at, call)?;
    }
    Ok(())
}

fn run(seed: u64) {
    let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let settings = Settings {
        receives: 6 + rng.below(12) as u16,
        payload: 1 + rng.below(40) as u32,
        send_buffer: 16 + rng.below(100) as u32,
        sources: 1 + rng.below(5) as u16,
        ..Settings::default()
    };
    let mut world = World::new(&settings);
    let mut all = || {
        for _ in 0..3000 {
            step(&mut world, &mut rng)?;
        }
        for at in 0..2 {
            world.call(at, Call::Shutdown)?;
        }
        world.drain()
    };
    if let Err(fault) = all() {
        panic!("WEFT_SEED={seed}: {fault}");
    }
}

#[test]
fn random_runs_deliver_every_byte() {
    if let Some(seed) = std::env::var("WEFT_SEED").ok().and_then(|s| s.parse().ok()) {
        return run(seed);
    }
    for seed in 0..150 {
        run(seed);
    }
}

//! All of the suite but what measures time, which is a program of its own (latency.rs).

mod closing;
mod copies;
mod cuts;
mod datagrams;
mod datagrams_local;
mod dials;
mod hostile;
mod leaks;
mod meeting;
mod million;
mod namespaces;
mod numbers;
mod ordering;
mod pressure;
mod processes;
mod random;
mod reliable;
mod roce;
mod roce_cm;
mod roce_on_the_way;
mod roce_siblings;
mod roce_ud;
mod scribble;
mod segments;
mod startup;
mod starvation;
mod stuck;
mod suite;
mod tls;
mod trust;

#[test]
#[ignore = "a twin's life"]
fn twin() {
    weft_conformance::twin::role();
}

//! Addresses under which other hosts reach this one.

use std::net::Ipv4Addr;

/// All of this host but those that only it can reach.
pub(super) fn of_this_host() -> Vec<Ipv4Addr> {
    parse(&std::fs::read_to_string("/proc/net/fib_trie").unwrap_or_default())
}

/// The kernel's list of routes: each address of this host stands in the line before `/32 host LOCAL`.
fn parse(routes: &str) -> Vec<Ipv4Addr> {
    let lines: Vec<&str> = routes.lines().map(str::trim).collect();
    let mut addresses = Vec::new();
    for pair in lines.windows(2).filter(|pair| pair[1].starts_with("/32 host LOCAL")) {
        let address = pair[0].rsplit(' ').next().and_then(|address| address.parse().ok());
        addresses.extend(address.filter(|address: &Ipv4Addr| !address.is_loopback()));
    }
    addresses.sort_unstable();
    addresses.dedup();
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_host_are_found_among_its_routes() {
        let routes = "Main:\n  +-- 10.0.0.0/8 2 0 2\n     |-- 10.0.0.0\n        /8 link UNICAST\n     |-- 10.1.2.3\n\
                      /32 host LOCAL\n     |-- 10.255.255.255\n        /32 link BROADCAST\n     |-- 127.0.0.1\n\
                      /32 host LOCAL\n     |-- 10.1.2.3\n        /32 host LOCAL\n";
        assert_eq!(parse(routes), [Ipv4Addr::new(10, 1, 2, 3)]);
    }
}

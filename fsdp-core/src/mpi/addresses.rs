//! Addresses under which other hosts reach this one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// All of this host but those that only it, or only its own network, can reach. Those of IPv4 first.
pub(super) fn of_this_host() -> Vec<IpAddr> {
    let read = |file| std::fs::read_to_string(file).unwrap_or_default();
    let v4 = v4_of(&read("/proc/net/fib_trie")).into_iter().map(IpAddr::V4);
    v4.chain(v6_of(&read("/proc/net/if_inet6")).into_iter().map(IpAddr::V6)).collect()
}

/// Where to listen so that others reach this host at as many of its addresses as can be: at those of both families, but
/// where the system takes the unspecified address of IPv6 for that family alone, at those of IPv4, if there are any.
pub(super) fn to_listen_at(addresses: &[IpAddr], is_v6_alone: bool) -> &'static str {
    if is_v6_alone && addresses.iter().any(IpAddr::is_ipv4) { "0.0.0.0" } else { "::" }
}

/// The kernel's list of routes: each address of this host stands in the line before `/32 host LOCAL`.
fn v4_of(routes: &str) -> Vec<Ipv4Addr> {
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

/// The kernel's list of interfaces: address, number, length of prefix, scope, flags, name. The global scope is 0; what lies
/// in it is reached without naming an interface.
fn v6_of(interfaces: &str) -> Vec<Ipv6Addr> {
    let address = |line: &str| {
        let mut words = line.split_whitespace();
        let digits = words.next()?;
        let is_global = words.nth(2)? == "00";
        is_global.then(|| u128::from_str_radix(digits, 16).ok().map(Ipv6Addr::from))?
    };
    interfaces.lines().filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_reached_by_ipv4_too_whatever_the_system_takes_the_address_of_ipv6_for() {
        let [v4, v6] = ["10.1.2.3", "fd00::2"].map(|address| address.parse::<IpAddr>().unwrap());
        assert_eq!([to_listen_at(&[v4, v6], false), to_listen_at(&[v6], true)], ["::"; 2]);
        assert_eq!([to_listen_at(&[v4, v6], true), to_listen_at(&[v4], true)], ["0.0.0.0"; 2]);
    }

    #[test]
    fn addresses_of_the_host_are_found_among_its_routes() {
        let routes = "Main:\n  +-- 10.0.0.0/8 2 0 2\n     |-- 10.0.0.0\n        /8 link UNICAST\n     |-- 10.1.2.3\n\
                      /32 host LOCAL\n     |-- 10.255.255.255\n        /32 link BROADCAST\n     |-- 127.0.0.1\n\
                      /32 host LOCAL\n     |-- 10.1.2.3\n        /32 host LOCAL\n";
        assert_eq!(v4_of(routes), [Ipv4Addr::new(10, 1, 2, 3)]);
    }

    #[test]
    fn global_addresses_are_found_among_the_interfaces() {
        let interfaces = "00000000000000000000000000000001 01 80 10 80       lo\n\
                          fe800000000000000000000000000001 02 40 20 80     eth0\n\
                          fd000000000000000000000000000002 02 40 00 80     eth0\n";
        assert_eq!(v6_of(interfaces), ["fd00::2".parse::<Ipv6Addr>().unwrap()]);
    }
}

//! What comes to the port of a rendezvous and is no rank of the run has no effect on it.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fsdp_core::{Control, ControlChannel, Entrance, Member, Refusal, RendezvousError, Secret};

use crate::sockets::{LONG, controls, member};

type Joined = Result<Arc<ControlChannel>, RendezvousError>;

/// A world of two of which rank 1 joins only after `disturb` has been at the port. All of it within the limit.
fn joins_in_spite_of(disturb: impl FnOnce(SocketAddr) -> Vec<TcpStream>) {
    let begun = Instant::now();
    let entrance = Entrance::open("127.0.0.1", 0).unwrap();
    let address = entrance.address();
    let host = thread::spawn(move || ControlChannel::host(entrance, &member(0, 2, LONG)));
    let held = disturb(address);
    let other = ControlChannel::join(&address.to_string(), &member(1, 2, LONG)).unwrap();
    let host = host.join().unwrap().unwrap();
    // They talk, while what was at the port is still there.
    host.put("a", b"1").unwrap();
    assert_eq!(other.get("a", LONG).unwrap(), b"1");
    drop(held);
    other.leave();
    host.finish().unwrap();
    assert!(TcpStream::connect_timeout(&address, Duration::from_secs(5)).is_err(), "the port is closed");
    assert!(begun.elapsed() < LONG / 2, "it took {:?}", begun.elapsed());
}

fn connect(address: SocketAddr) -> TcpStream {
    TcpStream::connect_timeout(&address, Duration::from_secs(20)).unwrap()
}

/// What the port says to `bytes`, until it closes the connection.
fn answer(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = connect(address);
    // It may have closed the connection by then.
    let _ = stream.write_all(bytes);
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("the connection is not closed"),
        _ => answer,
    }
}

#[test]
fn garbage_is_sent_away_without_an_answer() {
    joins_in_spite_of(|address| {
        assert_eq!(answer(address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"), b"");
        assert_eq!(answer(address, &[0; 1 << 16]), b"");
        assert_eq!(answer(address, b"FSDP\xFF\xFF")[..6], *b"FSDP\x02\x00", "it tells its version");
        // A greeting, and then garbage in place of a proof: a nonce, a refusal, the end.
        let hello = [&b"FSDP\x02\x00"[..], &[7; 32]].concat();
        let answer = answer(address, &[&hello[..], &[9; 40]].concat());
        assert_eq!((answer.len(), answer[38], &answer[39..]), (38 + 33, 1, &[0; 32][..]), "and no proof");
        Vec::new()
    });
}

#[test]
fn silent_and_slow_connections_hold_up_nobody() {
    joins_in_spite_of(|address| {
        let silent = (0..20).map(|_| connect(address));
        let slow = (0..20).map(|_| {
            let mut stream = connect(address);
            stream.write_all(b"FSDP\x02").unwrap();
            stream
        });
        silent.chain(slow).collect()
    });
}

#[test]
fn a_silent_connection_is_closed_after_a_while() {
    let entrance = Entrance::open("127.0.0.1", 0).unwrap();
    let address = entrance.address();
    let host = thread::spawn(move || ControlChannel::host(entrance, &member(0, 2, LONG)));
    assert_eq!(answer(address, b"FSD"), b"");
    let other = ControlChannel::join(&address.to_string(), &member(1, 2, LONG));
    assert!(other.is_ok() && host.join().unwrap().is_ok());
}

#[test]
fn a_scan_of_the_port_changes_nothing() {
    joins_in_spite_of(|address| {
        for _ in 0..300 {
            drop(connect(address));
        }
        Vec::new()
    });
}

#[test]
fn a_thousand_connections_change_nothing() {
    // As many as this process may hold open, and then others in their place.
    joins_in_spite_of(|address| {
        let mut held = std::collections::VecDeque::new();
        for number in 0..1000 {
            let mut stream = connect(address);
            if number % 2 == 0 {
                stream.write_all(b"FSDP\x02\x00abc").unwrap();
            }
            held.push_back(stream);
            if held.len() > 300 {
                held.pop_front();
            }
        }
        held.into()
    });
}

#[test]
fn a_rank_0_that_does_not_listen_is_given_up_soon_where_it_must_have_been_started() {
    let address = Entrance::open("127.0.0.1", 0).unwrap().address().to_string();
    let begun = Instant::now();
    let beside = Member { start_limit: Duration::from_millis(300), ..member(1, 2, LONG) };
    let error = ControlChannel::join(&address, &beside).err().unwrap();
    assert!(matches!(error, RendezvousError::NoAnswer { .. }) && begun.elapsed() < LONG / 2, "{error}");
    let error = error.to_string();
    assert!(error.contains(&format!("found no rank 0 at {address} within 300ms: Connection refused")), "{error}");
}

/// How rank 0 and a joining rank end, if rank 0 waits for a short time.
fn refused(joining: &Member) -> (Joined, Joined) {
    let entrance = Entrance::open("127.0.0.1", 0).unwrap();
    let address = entrance.address().to_string();
    let host = thread::spawn(move || ControlChannel::host(entrance, &member(0, 2, Duration::from_secs(2))));
    let joined = ControlChannel::join(&address, joining);
    (host.join().unwrap(), joined)
}

#[test]
fn whoever_has_another_secret_or_number_is_told_so_and_so_is_rank_0() {
    let short = Duration::from_secs(5);
    let other_secret = Secret::new("another secret of tests").unwrap();
    let cases = [
        (
            Member { secret: other_secret, ..member(1, 2, short) },
            Refusal::Secret,
            "give all ranks the same FSDP_SECRET",
        ),
        (member(1, 3, short), Refusal::WorldSize, "another world size"),
        (member(2, 2, short), Refusal::Rank, "give each process a rank of its own"),
        (member(0, 2, short), Refusal::Duplicate, "its rank is there already"),
    ];
    for (joining, expected, text) in cases {
        let (host, joined) = refused(&joining);
        let error = joined.err().unwrap();
        assert!(matches!(error, RendezvousError::Refused { refusal, .. } if refusal == expected), "{error}");
        assert!(error.to_string().contains(text), "{error}");
        let error = host.err().unwrap();
        assert!(matches!(&error, RendezvousError::Missing { missing, .. } if *missing == [1]), "{error}");
        let error = error.to_string();
        assert!(
            error.contains("for rank 1") && error.contains("Sent away: 127.0.0.1:") && error.contains(text),
            "{error}"
        );
    }
}

#[test]
fn a_second_process_of_one_rank_is_refused_and_the_run_goes_on() {
    let entrance = Entrance::open("127.0.0.1", 0).unwrap();
    let address = entrance.address().to_string();
    let host = thread::spawn(move || ControlChannel::host(entrance, &member(0, 3, LONG)));
    let joins: Vec<_> = [1, 1]
        .map(|rank| {
            let address = address.clone();
            thread::spawn(move || ControlChannel::join(&address, &member(rank, 3, LONG)))
        })
        .into();
    // One of them is refused, and only then does the last one come.
    while !joins.iter().any(|join| join.is_finished()) {
        thread::sleep(Duration::from_millis(5));
    }
    let last = ControlChannel::join(&address, &member(2, 3, LONG)).unwrap();
    let joined: Vec<_> = joins.into_iter().map(|join| join.join().unwrap()).collect();
    let refused: Vec<_> = joined.iter().filter_map(|joined| joined.as_ref().err()).collect();
    assert!(matches!(refused[..], [RendezvousError::Refused { refusal: Refusal::Duplicate, .. }]), "{refused:?}");
    let host = host.join().unwrap().unwrap();
    host.put("a", b"1").unwrap();
    assert_eq!(last.get("a", LONG).unwrap(), b"1");
}

#[test]
fn a_taken_port_is_an_error_with_the_remedy() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = Entrance::open("127.0.0.1", taken.local_addr().unwrap().port()).unwrap_err().to_string();
    assert!(
        error.contains("in use") && error.contains("MASTER_PORT") && error.contains("`rendezvous_port`"),
        "{error}"
    );
}

#[test]
fn a_rank_0_that_is_not_there_or_is_another_program_is_named_in_time() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let web_server = thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    });
    let error = ControlChannel::join(&address, &member(1, 2, LONG)).unwrap_err();
    assert!(matches!(error, RendezvousError::Refused { refusal: Refusal::NotOurs, .. }), "{error}");
    web_server.join().unwrap();
    let begun = Instant::now();
    let error = ControlChannel::join(&address, &member(1, 2, Duration::from_millis(300))).unwrap_err().to_string();
    assert!(error.contains(&format!("no rank 0 at {address}")) && error.contains("refused"), "{error}");
    assert!(begun.elapsed() < LONG / 4);
}

#[test]
fn a_rank_that_came_is_told_when_rank_0_gives_up() {
    let entrance = Entrance::open("127.0.0.1", 0).unwrap();
    let address = entrance.address().to_string();
    let host = thread::spawn(move || ControlChannel::host(entrance, &member(0, 3, Duration::from_secs(1))));
    let error = ControlChannel::join(&address, &member(1, 3, LONG)).unwrap_err();
    assert!(matches!(error, RendezvousError::Ended { rank: 1, .. }), "{error}");
    assert!(matches!(host.join().unwrap().err(), Some(RendezvousError::Missing { missing, .. }) if missing == [2]));
}

#[test]
fn a_world_of_one_needs_nobody() {
    let alone = controls(1, LONG).remove(0);
    alone.put("a", b"1").unwrap();
    assert_eq!(alone.get("a", LONG).unwrap(), b"1");
    alone.finish().unwrap();
}

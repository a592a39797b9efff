//! Peers in separate processes: the test binary starts itself again.
//!
//! The test program has one ignored test that calls [`role`], and names it in [`Twin::start`]. The twin takes
//! commands, one a line, and answers each with a line that begins with `@`.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use weft_verbs::cm::Listener;
use weft_verbs::{Device, Mr, RecvWr, RemoteAddr, SendWr, Wc, WcStatus};

use crate::bed::{Bed, End, Half, Memory, PATIENCE, Setup, take, until};
pub use crate::flood::{RECV, RECVS, REGION};
use crate::marks;
use crate::waits::state;

/// The number of increments that a twin makes when it is asked to add.
pub const ADDS: u64 = 20_000;
/// Set in the environment of a twin.
const VARIABLE: &str = "WEFT_TWIN";
/// In a twin's environment: the address that it listens on.
pub const LISTEN: &str = "WEFT_TWIN_LISTEN";
/// In a twin's environment: the address that it connects to, instead of listening. It reports the attempt first, and then the outcome.
pub const DIAL: &str = "WEFT_TWIN_DIAL";
/// In a twin's environment: the process that it continues once it is ready for a connection.
pub const CONTINUES: &str = "WEFT_TWIN_CONTINUES";

/// A command that runs one of this program's ignored tests in a new process.
///
/// # Errors
/// Those of finding the program.
pub fn again(wrapper: &[&str], test: &str) -> std::io::Result<Command> {
    let program = std::env::current_exe()?;
    let mut command = match wrapper {
        [] => Command::new(program),
        [first, rest @ ..] => {
            let mut command = Command::new(first);
            command.args(rest).arg(program);
            command
        }
    };
    command.args(["--exact", test, "--ignored", "--nocapture", "-q"]);
    Ok(command)
}

/// Stops a process, and waits until it has stopped.
fn stop(pid: Pid) {
    kill_process(pid, Signal::STOP).expect("a process of ours");
    let process = pid.as_raw_nonzero().to_string();
    until("the process stops", || state(&process) == Some('T'));
}

/// Another process.
pub struct Twin {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// The address that it listens on.
    pub addr: SocketAddr,
}

impl Twin {
    /// Starts one; `change` may change its user or environment.
    ///
    /// # Errors
    /// Those of starting a program, and the twin's error when it cannot open its device.
    pub fn start(test: &str, change: impl FnOnce(&mut Command)) -> std::io::Result<Twin> {
        Twin::inside(&[], test, change)
    }

    /// The same, started by another program that takes a command line as its last arguments.
    ///
    /// # Errors
    /// As [`Twin::start`].
    pub fn inside(
        wrapper: &[&str],
        test: &str,
        change: impl FnOnce(&mut Command),
    ) -> std::io::Result<Twin> {
        let mut command = again(wrapper, test)?;
        command
            .env(VARIABLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        change(&mut command);
        let mut child = command.spawn()?;
        let mut twin = Twin {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().ok_or(std::io::ErrorKind::Other)?),
            child,
            addr: ([127, 0, 0, 1], 0).into(),
        };
        twin.listens()?;
        Ok(twin)
    }

    /// Reads the address that it listens on: at the start, and when another twin has taken its place.
    ///
    /// # Errors
    /// The twin's error when it does not listen.
    pub fn listens(&mut self) -> std::io::Result<()> {
        let answer = self.answer();
        self.addr = answer.parse().map_err(|_| std::io::Error::other(answer))?;
        Ok(())
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("our own child");
    }

    /// Stops it, and waits until it has stopped.
    pub fn stop(&self) {
        stop(Pid::from_child(&self.child));
    }

    /// Stops it while it touches this memory of ours, and leaves it in that state.
    pub fn stop_inside(&self, stag: u32) {
        let pid = Pid::from_child(&self.child);
        marks::stop_inside(pid, &marks::segments(), Some(stag));
    }

    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    pub fn tell(&mut self, command: &str) {
        let input = self.input.as_mut().expect("it listens");
        writeln!(input, "{command}").expect("the twin lives");
    }

    pub fn answer(&mut self) -> String {
        loop {
            let mut line = String::new();
            let n = self.output.read_line(&mut line).expect("its output");
            assert_ne!(n, 0, "the twin has ended");
            if let Some((_, answer)) = line.split_once('@') {
                return answer.trim().to_owned();
            }
        }
    }

    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer()
    }

    /// Processor time of all its threads so far, in nanoseconds.
    pub fn cpu(&self) -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).expect("procfs");
        tasks
            .flatten()
            .filter_map(|task| std::fs::read_to_string(task.path().join("schedstat")).ok())
            .filter_map(|stat| stat.split_whitespace().next()?.parse::<u64>().ok())
            .sum()
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Our side of a connection with a twin.
pub struct Pair {
    /// The other process.
    pub twin: Twin,
    /// Our end.
    pub end: End,
    /// The twin's region that the library allocated, and its registered one.
    pub regions: [RemoteAddr; 2],
    /// A region of ours, of the same size.
    pub mr: Mr,
}

impl Pair {
    /// Connects with a new twin through shared memory.
    pub fn new(test: &str, half: &Half) -> Pair {
        Pair::with(
            test,
            half,
            &Bed::new(Setup::local(Memory::Both)).expect("a bed"),
        )
    }

    /// Connects `bed`'s first device with a new twin.
    pub fn with(test: &str, half: &Half, bed: &Bed) -> Pair {
        let twin = Twin::start(test, |_| ()).expect("a twin");
        let end = bed.end(&bed.a, half);
        Pair::over(twin, bed, end)
    }

    /// Connects this end with that twin.
    pub fn over(twin: Twin, bed: &Bed, end: End) -> Pair {
        let end = bed.dial(twin.addr, end, &bed.param()).expect("connect");
        Pair::of(twin, end)
    }

    /// A pair of this end and that twin, which are connected.
    pub fn of(mut twin: Twin, end: End) -> Pair {
        let keys = twin.answer();
        let mut keys = keys
            .split(' ')
            .map(|key| key.parse::<u32>().expect("a key"));
        let regions = [(); 2].map(|()| RemoteAddr {
            addr: 0,
            rkey: keys.next().expect("two keys"),
        });
        let mr = end.mr(REGION);
        Pair {
            twin,
            end,
            regions,
            mr,
        }
    }

    pub fn device(&self) -> &Device {
        &self.end.device
    }

    /// Sends a message and waits for its echo.
    pub fn echo(&mut self, byte: u8) {
        self.end
            .post_recv(RecvWr::new(7).sge(self.mr.sge(REGION - 8, 8)));
        self.end.run(SendWr::send(8).inline(&[byte; 8]));
        assert_eq!(self.twin.ask("echo"), "echoed");
        let wc = self.end.received();
        assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, 8));
        assert_eq!(self.mr.to_vec(REGION - 8, 8).expect("within"), [byte; 8]);
    }
}

/// True if this process is a twin.
pub fn is_one() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// The main loop of a twin. Does nothing in any other process.
pub fn role() {
    if !is_one() {
        return;
    }
    let Ok(mode) = weft_verbs::LocalMode::from_env() else {
        let error = Device::open().err().expect("what the environment says");
        println!("@{error}");
        return;
    };
    let setup = Setup {
        local: mode,
        ..Setup::local(Memory::Both)
    };
    let bed = Bed::new(setup).expect("a bed");
    let address = |variable| {
        let addr = std::env::var(variable).ok()?;
        Some(addr.parse().expect("an address"))
    };
    let channel = bed.b.create_comp_channel().expect("a channel");
    let half = Half {
        channel: Some(channel.clone()),
        ..Half::default()
    };
    let end = bed.end(&bed.b, &half);
    let buffer = vec![0; REGION];
    let place = buffer.as_ptr();
    let mrs = [
        end.mr(REGION),
        end.pd.reg_mr(buffer, crate::bed::ALL).expect("a region"),
    ];
    for id in 0..RECVS {
        end.post_recv(RecvWr::new(id).sge(mrs[0].sge(id as usize * RECV, RECV)));
    }
    // It listens as long as it lives.
    let (end, _listener) = if let Some(addr) = address(DIAL) {
        println!("@{addr}");
        match bed.dial(addr, end, &bed.param()) {
            Ok(end) => (end, None),
            Err(error) => {
                println!("@{error}");
                return;
            }
        }
    } else {
        let addr = address(LISTEN).unwrap_or(bed.any_addr());
        let listener = Listener::bind(&bed.b, addr, 16, &bed.param()).expect("a listener");
        println!("@{}", listener.local_addr());
        if let Ok(pid) = std::env::var(CONTINUES) {
            let pid = Pid::from_raw(pid.parse().expect("a number")).expect("a process");
            kill_process(pid, Signal::CONT).expect("it waits for us");
        }
        let request = listener.next_request(Some(PATIENCE)).expect("a request");
        let end = end.over(|qp| request.accept(qp, &bed.param()));
        (end.expect("accept"), Some(listener))
    };
    println!("@{} {}", mrs[0].rkey(), mrs[1].rkey());
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        let (command, number) = line.split_once(' ').unwrap_or((&line, "0"));
        let number: u64 = number.parse().expect("a number");
        match command {
            "where" => println!("@{place:p}"),
            "path" => println!("@{:?}", end.qp.path().expect("connected")),
            "echo" => {
                let wc = end.received();
                assert_eq!(wc.status, WcStatus::Success);
                let at = wc.wr_id as usize * RECV;
                end.run(SendWr::send(1).sge(mrs[0].sge(at, wc.byte_len as usize)));
                end.post_recv(RecvWr::new(wc.wr_id).sge(mrs[0].sge(at, RECV)));
                println!("@echoed");
            }
            // Compute, and read nothing but memory.
            "spin" => {
                println!("@spinning");
                until("the end of the spin", || {
                    mrs.iter()
                        .all(|mr| mr.load_u64(REGION - 8).expect("within") == u64::MAX)
                });
                println!("@spun");
            }
            "sum" => {
                let value = mrs[number as usize].load_u64(REGION - 16);
                println!("@{}", value.expect("within"));
            }
            // One child runs another program, and one does not.
            "fork" => {
                forks();
                println!("@forked");
            }
            "exec" => {
                println!("@goodbye");
                let error = Command::new("/bin/sleep").arg("30").exec();
                panic!("exec: {error}");
            }
            // Stop the process that writes here, and exit before it continues.
            "die" => {
                until("the first write", || {
                    mrs[1].load_u64(0).expect("within") != 0
                });
                stop(Pid::from_raw(number as i32).expect("a process"));
                kill_process(rustix::process::getpid(), Signal::KILL).expect("ourselves");
            }
            "flood" => {
                crate::flood::both_ways(&end, &mrs, number as u32);
                println!("@flooded");
            }
            "wait" => {
                println!("@waiting");
                let mut wc = [Wc::default(); 1];
                let n = end.rcq.wait(&mut wc, Some(PATIENCE)).expect("no overrun");
                println!("@{n}");
            }
            "event" => {
                end.rcq.req_notify(false);
                println!("@waiting");
                println!("@{:?}", channel.get_event(Some(PATIENCE)).is_some());
            }
            "add" => {
                let word = RemoteAddr {
                    addr: (REGION - 16) as u64,
                    rkey: number as u32,
                };
                for _ in 0..ADDS {
                    end.run(SendWr::fetch_add(1, word, 1).sge(mrs[0].sge(0, 8)));
                }
                println!("@added");
            }
            // Write to a region of the other process, without end.
            "write" => {
                println!("@writing");
                let key = number as u32;
                let to = RemoteAddr { addr: 0, rkey: key };
                let mut wc = [Wc::default(); 1];
                loop {
                    let wr = SendWr::write(1, to).sge(mrs[0].whole()).signaled();
                    let posted = end.qp.post_send_one(wr).is_ok();
                    let n = end.scq.wait(&mut wc, Some(PATIENCE)).expect("no overrun");
                    if !posted || n == 0 || wc[0].status != WcStatus::Success {
                        break;
                    }
                }
                println!("@over");
            }
            "pingpong" => {
                for round in 0..number {
                    let wc = take(&end.rcq, 1)[0];
                    assert_eq!(wc.status, WcStatus::Success, "round {round}");
                    let at = wc.wr_id as usize * RECV;
                    end.post_recv(RecvWr::new(wc.wr_id).sge(mrs[0].sge(at, RECV)));
                    let back = mrs[0].sge(at, wc.byte_len as usize);
                    end.post(SendWr::send(1).sge(back).signaled());
                    assert_eq!(end.sent().status, WcStatus::Success);
                }
                println!("@done");
            }
            other => panic!("{other}?"),
        }
    }
}

/// Children by a real `fork` (`posix_spawn` cannot change the user): one runs a program, one ends without.
pub fn forks() {
    let uid = rustix::process::getuid().as_raw();
    let status = Command::new("/bin/true").uid(uid).status().expect("fork");
    assert!(status.success());
    let error = Command::new("/nowhere/to/be/found").uid(uid).status();
    assert!(error.is_err());
    // Long enough for a tick of the engine in parent and child: the pace, not a synchronisation.
    std::thread::sleep(Duration::from_millis(2));
}

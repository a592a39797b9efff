//! The programs: how to start and call each, and how to parse its output.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::Path;

use super::place::Place;
use super::world::{Said, Server, Stack, User, World, is_root};
use crate::aims::Limit::{self, AtLeast, AtMost};
use crate::children::{find, free_port};
use crate::error::{BenchError, Result, failed};
use crate::named::named;

/// A comparison of one stack with another.
pub(crate) struct Goal {
    pub(crate) name: &'static str,
    pub(crate) stack: Stack,
    pub(crate) beside: Stack,
    /// The ratio's target.
    pub(crate) limit: Limit,
    /// The goal is for the difference in the unit of the case, and not for the ratio.
    pub(crate) difference: bool,
}

/// One value of a run.
pub(crate) struct Measured {
    pub(crate) value: f64,
    /// Connections of the client that went over to shared memory.
    pub(crate) over: u32,
}

type Measure<'a> = Box<dyn FnMut(Stack) -> Result<Measured> + 'a>;

/// The quantity that is measured on several stacks, in turn, and its targets.
pub(crate) struct About {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) stacks: &'static [Stack],
    pub(crate) goals: &'static [Goal],
}

/// The quantity, and the function that measures it on a stack.
pub(crate) struct Case<'a> {
    pub(crate) about: &'static About,
    pub(crate) measure: Measure<'a>,
}

impl<'a> Case<'a> {
    fn new(about: &'static About, measure: impl FnMut(Stack) -> Result<Measured> + 'a) -> Self {
        let measure = Box::new(measure);
        Self { about, measure }
    }
}

/// Plain TCP and weft.
const BOTH: [Stack; 2] = [Stack::Plain, Stack::Weft];
const WITH_UNIX: [Stack; 3] = [Stack::Plain, Stack::Weft, Stack::Unix];
const ONE_SIDE: [Stack; 3] = [Stack::Plain, Stack::OneSide, Stack::Weft];

const fn beside(name: &'static str, stack: Stack, beside: Stack, limit: Limit) -> Goal {
    Goal {
        name,
        stack,
        beside,
        limit,
        difference: false,
    }
}

/// weft compared with plain TCP.
const fn goal(name: &'static str, limit: Limit) -> Goal {
    beside(name, Stack::Weft, Stack::Plain, limit)
}

/// A table of cases: the name, unit, stacks and goals of each.
macro_rules! cases {
    ($($case:ident: $name:literal, $unit:literal, $stacks:expr => $($goal:expr),*;)*) => {
        $(const $case: About = About { name: $name, unit: $unit, stacks: &$stacks, goals: &[$($goal),*] };)*
        pub(crate) const CASES: &[About] = &[$($case),*];
    };
}

cases! {
    IPERF3_1M: "iperf3, 1 MiB", "Gb/s", ONE_SIDE =>
        goal("iperf3, 1 MiB", AtLeast(2.5)),
        beside("iperf3, 1 MiB; the peer without weft", Stack::OneSide, Stack::Plain, AtLeast(0.97));
    IPERF3_128K: "iperf3, 128 KiB", "Gb/s", BOTH => goal("iperf3, 128 KiB", AtLeast(2.5));
    REDIS_50: "redis-benchmark -P 1, 50 clients", "requests/s", WITH_UNIX =>
        goal("redis-benchmark -P 1, 50 clients", AtLeast(2.0)),
        beside("redis, Unix socket, 50 clients", Stack::Unix, Stack::Plain, Limit::None);
    REDIS_1: "redis-benchmark -P 1, 1 client", "requests/s", WITH_UNIX =>
        goal("redis-benchmark -P 1, 1 client", AtLeast(1.5)),
        beside("redis, Unix socket, 1 client", Stack::Unix, Stack::Plain, Limit::None);
    REDIS_USERS: "redis-benchmark -P 1, 50 clients, of another user", "requests/s", WITH_UNIX =>
        goal("redis-benchmark of another user, 50 clients", Limit::None),
        beside("redis of another user, Unix socket, 50 clients", Stack::Unix, Stack::Plain, Limit::None);
    REDIS_CONTAINERS: "redis-benchmark -P 1, 50 clients, two containers", "requests/s", WITH_UNIX =>
        goal("redis-benchmark in two containers, 50 clients", Limit::None),
        beside("redis in two containers, Unix socket, 50 clients", Stack::Unix, Stack::Plain, Limit::None);
    ECHO_SLEEPING: "1 KiB request/response, sleeping", "round trips/s", BOTH => goal("1 KiB request/response, sleeping", AtLeast(2.4));
    ECHO_SPINNING: "1 KiB request/response, spinning", "round trips/s", BOTH => goal("1 KiB request/response, spinning", AtLeast(7.0));
    SOCKPERF: "sockperf ping-pong, 14 B", "µs one way", BOTH => goal("sockperf ping-pong, 14 B", AtMost(0.5));
    NGINX_SMALL: "nginx + wrk, 612 B", "requests/s", BOTH => goal("nginx + wrk, 612 B", AtLeast(1.4));
    NGINX_BIG: "nginx + wrk, 1 MiB", "requests/s", BOTH => goal("nginx + wrk, 1 MiB", AtLeast(1.8));
    MEMCACHED: "memcached, 4 connections", "operations/s", BOTH => goal("memcached, 4 connections", AtLeast(1.7));
    PGBENCH_S: "pgbench -S, 8 clients", "transactions/s", WITH_UNIX =>
        goal("pgbench -S, 8 clients", AtLeast(1.2)),
        beside("pgbench -S, beside its Unix socket", Stack::Weft, Stack::Unix, AtLeast(1.0));
    PGBENCH_TPC_B: "pgbench TPC-B, 8 clients", "transactions/s", WITH_UNIX =>
        goal("pgbench TPC-B, 8 clients", AtLeast(0.98)),
        beside("pgbench TPC-B, beside its Unix socket", Stack::Weft, Stack::Unix, AtLeast(1.0));
    PROXY: "pgbench -S through nginx, 8 clients, three users", "transactions/s", BOTH =>
        goal("pgbench -S through nginx of three users", AtLeast(1.3));
    CONNECT: "connect, one request, close", "connections/s", ONE_SIDE =>
        beside("connect, one request, close; the peer without weft", Stack::OneSide, Stack::Plain, AtLeast(0.97)),
        goal("connect, one request, close; both with weft", AtLeast(0.9));
    // /proc is exact to some microseconds; a process that wakes up now and then uses more.
    IDLE: "CPU of 1,000 idle connections", "ms/s", BOTH =>
        Goal { difference: true, ..goal("CPU of 1,000 idle connections", AtMost(0.5)) };
}

named! {
    /// Programs that belong together, as `--program` names them.
    pub enum Program {
        /// Throughput of iperf3 with 1 MiB and 128 KiB messages
        Iperf3 = "iperf3",
        /// redis-benchmark with 50 clients and with one, over TCP and over the server's Unix socket
        Redis = "redis",
        /// The same where the server is of another user
        Users = "users",
        /// The same in two network namespaces on a bridge, which have a folder in WEFT_LOCAL_DIR
        Containers = "containers",
        /// 1 KiB request and response, both sides sleeping or spinning
        Echo = "echo",
        /// Ping-pong of 14 B with sockperf
        Sockperf = "sockperf",
        /// nginx with wrk: a small file and 1 MiB
        Nginx = "nginx",
        /// memcached with a client of weft's own
        Memcached = "memcached",
        /// Postgres with pgbench: -S and TPC-B with 8 clients, over TCP and over the server's Unix socket
        Postgres = "postgres",
        /// pgbench -S with 8 clients through nginx (its stream module) to Postgres, each a user of its own
        Proxy = "proxy",
        /// Connect, one request, close
        Connect = "connect",
        /// CPU time of 1,000 idle connections to nginx
        Idle = "idle",
    }
}

impl Program {
    /// The programs that must be installed, and Debian's packages.
    fn needs(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Iperf3 => &[("iperf3", "iperf3")],
            Self::Redis => &REDIS,
            Self::Users => &[REDIS[0], REDIS[1], ("setpriv", "util-linux")],
            Self::Containers => &[REDIS[0], REDIS[1], ("ip", "iproute2")],
            Self::Sockperf => &[("sockperf", "sockperf")],
            Self::Nginx => &[("nginx", "nginx-light"), ("wrk", "wrk")],
            Self::Idle => &[("nginx", "nginx-light")],
            Self::Memcached => &[("memcached", "memcached")],
            Self::Postgres => &[("pgbench", "postgresql")],
            Self::Proxy => &[("pgbench", "postgresql"), ("nginx", "nginx-light")],
            Self::Echo | Self::Connect => &[],
        }
    }

    /// The reason why it cannot be measured here.
    pub(crate) fn missing(self) -> Option<String> {
        let mut needs = self.needs().iter();
        let lacks = needs.find(|(name, _)| find(name).is_none());
        if let Some((name, package)) = lacks {
            return Some(format!("{name} is not installed (Debian: {package})"));
        }
        match self {
            Self::Users | Self::Containers | Self::Proxy if !is_root() => {
                Some("it needs root".to_owned())
            }
            Self::Proxy if !Path::new(STREAM_MODULE).exists() => {
                Some("nginx has no stream module (Debian: libnginx-mod-stream)".to_owned())
            }
            Self::Postgres | Self::Proxy if postgres_tool("initdb").is_none() => {
                Some("the server's programs are not installed (Debian: postgresql)".to_owned())
            }
            Self::Postgres | Self::Proxy if is_root() && postgres_user().is_none() => Some(
                "postgres does not run as root, and there is no user postgres (Debian: postgresql)"
                    .to_owned(),
            ),
            _ => None,
        }
    }

    /// Starts the necessary servers, and returns the cases.
    pub(crate) fn cases(self, world: &World) -> Result<Vec<Case<'_>>> {
        match self {
            Self::Iperf3 => Ok(iperf3(world)),
            Self::Redis => redis(world, Place::here(), &[(&REDIS_50, 50), (&REDIS_1, 1)]),
            Self::Users => redis(world, Place::of_another_user(), &[(&REDIS_USERS, 50)]),
            Self::Containers => {
                let place = Place::in_containers(world)?;
                redis(world, place, &[(&REDIS_CONTAINERS, 50)])
            }
            Self::Echo => echo(world),
            Self::Sockperf => sockperf(world),
            Self::Nginx => nginx(world),
            Self::Memcached => memcached(world),
            Self::Postgres => postgres(world),
            Self::Proxy => proxy(world),
            Self::Connect => connect(world),
            Self::Idle => idle(world),
        }
    }
}

/// The number behind a mark.
fn number(text: &str, mark: &str) -> Result<f64> {
    let behind = text.split_once(mark).map(|(_, rest)| rest.trim_start());
    let digits = behind.map(|rest| {
        let end = rest.find(|c: char| !(c.is_ascii_digit() || "+-.e".contains(c)));
        rest.get(..end.unwrap_or(rest.len())).unwrap_or_default()
    });
    let value = digits.and_then(|digits| digits.parse::<f64>().ok());
    value.ok_or_else(|| {
        failed(
            "read a client's result",
            format!("no number after '{mark}'"),
        )
    })
}

fn measured(said: &Said, mark: &str) -> Result<Measured> {
    Ok(Measured {
        value: number(&said.text, mark)?,
        over: said.over,
    })
}

/// One server without weft and one under it, each at a separate port.
struct Servers {
    at: BTreeMap<Stack, (u16, Server)>,
}

impl Servers {
    /// `start`: the server's words for a port.
    fn start(
        world: &World,
        user: Option<User>,
        words: impl Fn(Stack, u16) -> Result<String>,
    ) -> Result<Self> {
        let mut at = BTreeMap::new();
        for stack in BOTH {
            let port = free_port()?;
            let server = world.server(stack, &words(stack, port)?, port, user)?;
            at.insert(stack, (port, server));
        }
        Ok(Self { at })
    }

    /// The server that a stack's client talks to.
    fn of(&self, stack: Stack) -> Result<&(u16, Server)> {
        let whose = if stack == Stack::Weft {
            Stack::Weft
        } else {
            Stack::Plain
        };
        self.at
            .get(&whose)
            .ok_or_else(|| failed("find a server", "none"))
    }

    fn port(&self, stack: Stack) -> Result<u16> {
        self.of(stack).map(|(port, _)| *port)
    }
}

fn iperf3(world: &World) -> Vec<Case<'_>> {
    let case = |about, length: &'static str| {
        Case::new(about, move |stack| {
            let port = free_port()?;
            // It serves one client: the connection that is accepted is the measured one.
            let line = format!("iperf3 -s -1 -B 127.0.0.1 -p {port}");
            let server = world.server(stack, &line, port, None)?;
            let seconds = world.seconds;
            let line = format!("iperf3 -J -c 127.0.0.1 -p {port} -l {length} -t {seconds}");
            let said = world.client(stack, &line, None)?;
            drop(server);
            let json = said.text.get(..said.text.rfind('}').map_or(0, |at| at + 1));
            let json: serde_json::Value = serde_json::from_str(json.unwrap_or_default())
                .map_err(|e| failed("read iperf3's result", e.to_string()))?;
            let rate = json.pointer("/end/sum_received/bits_per_second");
            let rate = rate.and_then(serde_json::Value::as_f64);
            let rate = rate.ok_or_else(|| failed("read iperf3's result", "no rate"))?;
            Ok(Measured {
                value: rate / 1e9,
                over: said.over,
            })
        })
    };
    vec![case(&IPERF3_1M, "1M"), case(&IPERF3_128K, "128K")]
}

/// The programs of redis, and Debian's packages.
const REDIS: [(&str, &str); 2] = [
    ("redis-server", "redis-server"),
    ("redis-benchmark", "redis-tools"),
];

fn redis<'a>(
    world: &'a World,
    place: Place,
    abouts: &[(&'static About, u32)],
) -> Result<Vec<Case<'a>>> {
    let dir = world.folder(&format!("redis-{}", place.address))?;
    // A server of another user has its socket there.
    rustix::fs::chmod(&dir, rustix::fs::Mode::from_raw_mode(0o777))
        .map_err(|e| BenchError::system("open a folder to other users")(e.into()))?;
    let socket = dir.join("socket");
    let servers = Servers::start(world, None, |stack, port| {
        let mut text = format!(
            "bind {}\nprotected-mode no\nport {port}\nsave \"\"\nappendonly no\ndir {}\n",
            place.address,
            dir.display()
        );
        if stack == Stack::Plain {
            let _ = writeln!(text, "unixsocket {}\nunixsocketperm 777", socket.display());
        }
        let conf = dir.join(format!("conf-{port}"));
        fs::write(&conf, text).map_err(BenchError::system("write a file"))?;
        Ok(format!("{}redis-server {}", place.server, conf.display()))
    })?;
    let servers = std::rc::Rc::new((servers, place));
    let case = |&(about, clients): &(&'static About, u32)| {
        let servers = servers.clone();
        let socket = socket.clone();
        let mut requests = 4000_u32;
        Case::new(about, move |stack| {
            let (
                servers,
                Place {
                    client, address, ..
                },
            ) = &*servers;
            let at = match stack {
                Stack::Unix => format!("-s {}", socket.display()),
                _ => format!("-h {address} -p {}", servers.port(stack)?),
            };
            let line = format!(
                "{client}redis-benchmark {at} -c {clients} -n {requests} -P 1 -t get --csv"
            );
            let said = world.client(stack, &line, None)?;
            let done = measured(&said, "\"GET\",\"")?;
            if requests == 4000 {
                // The first run is not counted. It sets the number of requests for the requested time.
                let wanted = done.value * f64::from(world.seconds);
                requests = wanted.clamp(4001.0, 4e7) as u32;
            }
            Ok(done)
        })
    };
    Ok(abouts.iter().map(case).collect())
}

fn echo(world: &World) -> Result<Vec<Case<'_>>> {
    let case = |about, spin: &'static str| -> Result<Case<'_>> {
        let servers = Servers::start(world, None, |_, port| {
            Ok(world.part(&format!("echo --port {port}{spin}")))
        })?;
        Ok(Case::new(about, move |stack| {
            let (port, seconds) = (servers.port(stack)?, world.seconds);
            let line = world.part(&format!("ping --port {port} --seconds {seconds}{spin}"));
            measured(&world.client(stack, &line, None)?, "rate ")
        }))
    };
    // A server that spins does so only while it has a client.
    Ok(vec![
        case(&ECHO_SLEEPING, "")?,
        case(&ECHO_SPINNING, " --spin")?,
    ])
}

fn sockperf(world: &World) -> Result<Vec<Case<'_>>> {
    let servers = Servers::start(world, None, |_, port| {
        Ok(format!("sockperf server --tcp -i 127.0.0.1 -p {port}"))
    })?;
    Ok(vec![Case::new(&SOCKPERF, move |stack| {
        let (port, seconds) = (servers.port(stack)?, world.seconds);
        // Without a limit, sockperf treats more than 600,000 round trips a second as an error.
        let line = format!(
            "sockperf ping-pong --tcp -i 127.0.0.1 -p {port} -m 14 -t {seconds} --mps 300000"
        );
        measured(&world.client(stack, &line, None)?, "Latency is ")
    })])
}

const NGINX: &str = "daemon off; worker_processes 1; worker_rlimit_nofile 16384; pid DIR/pid; error_log DIR/error;
events { worker_connections 4096; }
http { access_log off; client_body_temp_path DIR/b; proxy_temp_path DIR/p; fastcgi_temp_path DIR/f; uwsgi_temp_path DIR/u; scgi_temp_path DIR/s;
  sendfile on; keepalive_requests 1000000000; keepalive_timeout 600s;
  server { listen 127.0.0.1:PORT; root DIR/www; } }";

/// nginx without weft and under it, with three files.
fn nginx_servers(world: &World, name: &str) -> Result<Servers> {
    let nginx = find("nginx").unwrap_or_default();
    Servers::start(world, None, |_, port| {
        let dir = world.folder(&format!("{name}-{port}"))?;
        let www = dir.join("www");
        let write = |path: &Path, bytes: &[u8]| {
            fs::write(path, bytes).map_err(BenchError::system("write a file"))
        };
        fs::create_dir_all(&www).map_err(BenchError::system("make a folder"))?;
        write(&www.join("small"), &[b's'; 612])?;
        write(&www.join("big"), &vec![b'b'; 1 << 20])?;
        write(&www.join("tiny"), b"\nthe-end\n")?;
        let shown = dir.display().to_string();
        let mut text = NGINX
            .replace("DIR", &shown)
            .replace("PORT", &port.to_string());
        if is_root() {
            // Workers of another user would not meet this user's clients.
            text = format!("user root; {text}");
        }
        write(&dir.join("conf"), text.as_bytes())?;
        let nginx = nginx.display();
        Ok(format!(
            "{nginx} -c {shown}/conf -p {shown} -e {shown}/error"
        ))
    })
}

fn nginx(world: &World) -> Result<Vec<Case<'_>>> {
    let servers = std::rc::Rc::new(nginx_servers(world, "nginx")?);
    let case = |about, file: &'static str| {
        let servers = servers.clone();
        Case::new(about, move |stack| {
            let (port, seconds) = (servers.port(stack)?, world.seconds);
            let line = format!("wrk -t 1 -c 16 -d {seconds} http://127.0.0.1:{port}/{file}");
            let said = world.client(stack, &line, None)?;
            if said.text.contains("Non-2xx") || said.text.contains("Socket errors") {
                return Err(failed("run wrk", "it got errors"));
            }
            measured(&said, "Requests/sec:")
        })
    };
    Ok(vec![case(&NGINX_SMALL, "small"), case(&NGINX_BIG, "big")])
}

fn memcached(world: &World) -> Result<Vec<Case<'_>>> {
    let user = if is_root() { " -u root" } else { "" };
    let servers = Servers::start(world, None, |_, port| {
        Ok(format!("memcached{user} -l 127.0.0.1 -p {port} -U 0 -t 2"))
    })?;
    Ok(vec![Case::new(&MEMCACHED, move |stack| {
        let (port, seconds) = (servers.port(stack)?, world.seconds);
        let line = world.part(&format!(
            "memcached --port {port} --seconds {seconds} --connections 4"
        ));
        measured(&world.client(stack, &line, None)?, "rate ")
    })])
}

/// A program of the newest server that Debian has installed.
fn postgres_tool(name: &str) -> Option<std::path::PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten();
    let files = versions
        .flatten()
        .map(|version| version.path().join("bin").join(name));
    let found = files.filter(|file| file.is_file()).max();
    found.or_else(|| find(name))
}

/// The user postgres, by the owner of Debian's folder for its data.
fn postgres_user() -> Option<User> {
    let about = fs::metadata("/var/lib/postgresql").ok()?;
    (about.uid() != 0).then(|| User {
        uid: about.uid(),
        gid: about.gid(),
    })
}

/// Postgres without weft and under it, with pgbench's tables.
struct Postgres {
    servers: Servers,
    /// The folder of its Unix sockets.
    home: std::path::PathBuf,
    user: Option<User>,
}

/// `before`: words before the servers' command lines.
fn postgres_servers(world: &World, name: &str, before: &str) -> Result<Postgres> {
    let user = if is_root() { postgres_user() } else { None };
    let tool = |name| {
        let file = postgres_tool(name);
        file.ok_or_else(|| failed("find postgres", format!("there is no {name}")))
    };
    let (initdb, server) = (tool("initdb")?, tool("postgres")?);
    let home = world.folder(name)?;
    if let Some(user) = user {
        chown(&home, Some(user.uid), Some(user.gid))
            .map_err(BenchError::system("give postgres its folder"))?;
    }
    let servers = Servers::start(world, user, |_, port| {
        let data = home.join(port.to_string());
        let line = format!(
            "{} -A trust -U bench --no-sync -D {}",
            initdb.display(),
            data.display()
        );
        world.plainly(&line, user)?;
        // The disk is not measured.
        let settings = format!(
            "listen_addresses = '127.0.0.1'\nport = {port}\nunix_socket_directories = '{}'\nfsync = off\nsynchronous_commit = off\n\
             autovacuum = off\nmax_connections = 50\nmax_wal_size = '4GB'\ncheckpoint_timeout = '1h'\n",
            home.display()
        );
        fs::write(data.join("postgresql.auto.conf"), settings)
            .map_err(BenchError::system("write a file"))?;
        Ok(format!(
            "{before}{} -D {}",
            server.display(),
            data.display()
        ))
    })?;
    for stack in BOTH {
        let port = servers.port(stack)?;
        let line = format!("pgbench -i -q -s 5 -U bench -h 127.0.0.1 -p {port} postgres");
        // A server that listens may still refuse for a moment.
        let mut done = world.plainly(&line, user);
        for _ in 0..50 {
            if done.is_ok() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
            done = world.plainly(&line, user);
        }
        done?;
    }
    Ok(Postgres {
        servers,
        home,
        user,
    })
}

fn postgres(world: &World) -> Result<Vec<Case<'_>>> {
    let postgres = std::rc::Rc::new(postgres_servers(world, "postgres", "")?);
    let case = |about, options: &'static str| {
        let postgres = postgres.clone();
        Case::new(about, move |stack| {
            let (port, seconds) = (postgres.servers.port(stack)?, world.seconds);
            let host = match stack {
                Stack::Unix => postgres.home.display().to_string(),
                _ => "127.0.0.1".to_owned(),
            };
            let line = format!(
                "pgbench -n{options} -c 8 -j 2 -T {seconds} -U bench -h {host} -p {port} postgres"
            );
            measured(&world.client(stack, &line, postgres.user)?, "\ntps = ")
        })
    };
    Ok(vec![case(&PGBENCH_S, " -S"), case(&PGBENCH_TPC_B, "")])
}

/// nginx's module for TCP streams, where Debian has it.
const STREAM_MODULE: &str = "/usr/lib/nginx/modules/ngx_stream_module.so";

const NGINX_STREAM: &str = "load_module MODULE; user www-data; daemon off; worker_processes 1; pid DIR/pid; error_log DIR/error;
events { worker_connections 1024; }
stream { server { listen 127.0.0.1:PORT; proxy_pass 127.0.0.1:SERVER; } }";

/// pgbench is root's, nginx's worker is www-data's, the server is postgres'.
fn proxy(world: &World) -> Result<Vec<Case<'_>>> {
    let with = |users: &[u32]| {
        let users: Vec<String> = users.iter().map(u32::to_string).collect();
        format!("env WEFT_RUN_WITH={} ", users.join(","))
    };
    let web = world.plainly("id -u www-data", None)?.text;
    let web = web.trim().parse();
    let web = web.map_err(|_| failed("find a user", "there is no www-data"))?;
    let root = 0;
    let postgres = postgres_servers(world, "postgres-behind-nginx", &with(&[web, root]))?;
    let database = postgres.user.map_or(root, |user| user.uid);
    let nginx = find("nginx").unwrap_or_default();
    let proxies = Servers::start(world, None, |stack, port| {
        let dir = world.folder(&format!("proxy-{port}"))?;
        let shown = dir.display().to_string();
        let text = NGINX_STREAM
            .replace("MODULE", STREAM_MODULE)
            .replace("DIR", &shown)
            .replace("PORT", &port.to_string())
            .replace("SERVER", &postgres.servers.port(stack)?.to_string());
        fs::write(dir.join("conf"), text).map_err(BenchError::system("write a file"))?;
        let (with, nginx) = (with(&[root, database]), nginx.display());
        Ok(format!(
            "{with}{nginx} -c {shown}/conf -p {shown} -e {shown}/error"
        ))
    })?;
    Ok(vec![Case::new(&PROXY, move |stack| {
        // The servers end with the case.
        let _ = &postgres;
        let (port, seconds) = (proxies.port(stack)?, world.seconds);
        let line = format!(
            "{}pgbench -n -S -c 8 -j 2 -T {seconds} -U bench -h 127.0.0.1 -p {port} postgres",
            with(&[web])
        );
        measured(&world.client(stack, &line, None)?, "\ntps = ")
    })])
}

fn connect(world: &World) -> Result<Vec<Case<'_>>> {
    let servers = Servers::start(world, None, |_, port| {
        Ok(world.part(&format!("echo --port {port} --size 64")))
    })?;
    Ok(vec![Case::new(&CONNECT, move |stack| {
        let (port, seconds) = (servers.port(stack)?, world.seconds);
        let line = world.part(&format!("once --port {port} --seconds {seconds} --size 64"));
        measured(&world.client(stack, &line, None)?, "rate ")
    })])
}

fn idle(world: &World) -> Result<Vec<Case<'_>>> {
    let servers = nginx_servers(world, "idle")?;
    Ok(vec![Case::new(&IDLE, move |stack| {
        let (port, server) = servers.of(stack)?;
        let (id, seconds) = (server.id(), world.seconds);
        let line = world.part(&format!(
            "hold --port {port} --seconds {seconds} --server {id} --connections 1000"
        ));
        let said = world.client(stack, &line, None)?;
        let cpu = number(&said.text, "cpu ")?;
        Ok(Measured {
            value: cpu * 1e3 / f64::from(seconds),
            over: said.over,
        })
    })])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_behind_their_mark() {
        let close = |text: &str, mark: &str, value: f64| {
            assert!((number(text, mark).unwrap() - value).abs() < 1e-9, "{text}");
        };
        close("Requests/sec:  12345.67\nx", "Requests/sec:", 12345.67);
        close("\"GET\",\"99800.40\",\"0.25\"", "\"GET\",\"", 99800.40);
        close("x\ntps = 345.6 (without initial)", "\ntps = ", 345.6);
        close(
            "sockperf: Summary: Latency is 7.431 usec",
            "Latency is ",
            7.431,
        );
        close("rate 1e3", "rate ", 1000.0);
        assert!(number("rate", "rate ").is_err());
        assert!(number("rate x", "rate ").is_err());
    }
}

//! Just enough of HTTP/1.1 and of `WebDriver` for the tests of the proxy.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    /// A header's value, by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// One request on a connection of its own.
pub fn request(
    addr: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Answer {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_mins(1)))
        .unwrap();
    let mut head = format!(
        "{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {}\r\n",
        body.len()
    );
    if !headers.iter().any(|(name, _)| *name == "Host") {
        let _ = write!(head, "Host: {addr}\r\n");
    }
    for (name, value) in headers {
        let _ = write!(head, "{name}: {value}\r\n");
    }
    stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).expect(&line).parse().unwrap();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line
            .trim_end()
            .split_once(": ")
            .or_else(|| line.trim_end().split_once(':'))
        else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    let mut body = Vec::new();
    let length = headers.iter().find(|(n, _)| n == "content-length");
    match length {
        Some(_) if method == "HEAD" || status == 304 => {}
        Some((_, length)) => {
            let length: usize = length.parse().unwrap();
            body.resize(length, 0);
            reader.read_exact(&mut body).unwrap();
        }
        None => {
            let _ = reader.read_to_end(&mut body).unwrap();
        }
    }
    Answer {
        status,
        headers,
        body,
    }
}

pub fn get(addr: SocketAddr, path: &str, headers: &[(&str, &str)]) -> Answer {
    request(addr, "GET", path, headers, &[])
}

/// Chromium without a screen, driven by its chromedriver; both are killed on drop.
pub struct Browser {
    driver: Child,
    addr: SocketAddr,
    session: String,
    _profile: tempfile::TempDir,
}

impl Browser {
    pub fn start() -> Self {
        let profile = tempfile::tempdir().unwrap();
        let mut driver = Command::new("chromedriver")
            .arg("--port=0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines();
        let port = lines
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| {
                let (_, port) = line.split_once("successfully on port ")?;
                port.trim_end_matches('.').parse::<u16>().ok()
            })
            .expect("chromedriver says its port");
        std::thread::spawn(move || lines.count());
        let addr = SocketAddr::from(([127, 0, 0, 1], port));
        let args = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--mute-audio",
            "--window-size=1200,1400",
        ];
        let mut args: Vec<String> = args.map(Into::into).into();
        args.push(format!("--user-data-dir={}", profile.path().display()));
        let mut browser = Self {
            driver,
            addr,
            session: String::new(),
            _profile: profile,
        };
        let wanted =
            json!({"capabilities": {"alwaysMatch": {"goog:chromeOptions": {"args": args}}}});
        let made = browser.call("POST", "/session", &wanted);
        browser.session = made["sessionId"].as_str().map_or(String::new(), Into::into);
        assert!(!browser.session.is_empty(), "{made}");
        browser
    }

    fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        let text = if method == "GET" || method == "DELETE" {
            String::new()
        } else {
            body.to_string()
        };
        let headers = [("Content-Type", "application/json"), ("Host", "localhost")];
        let answer = request(self.addr, method, path, &headers, text.as_bytes());
        let value: Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(answer.status, 200, "{method} {path}: {value}");
        value["value"].clone()
    }

    fn at(&self, path: &str) -> String {
        format!("/session/{}{path}", self.session)
    }

    pub fn open(&self, url: &str) {
        self.call("POST", &self.at("/url"), &json!({"url": url}));
    }

    /// Clicks on the middle of the first element of a CSS selector, as a user does.
    pub fn click(&self, selector: &str) {
        let found = self.call(
            "POST",
            &self.at("/element"),
            &json!({"using": "css selector", "value": selector}),
        );
        let id = found
            .as_object()
            .unwrap()
            .values()
            .next()
            .unwrap()
            .as_str()
            .unwrap();
        self.call(
            "POST",
            &self.at(&format!("/element/{id}/click")),
            &json!({}),
        );
    }

    /// The value of a JavaScript expression in the page.
    pub fn eval(&self, expression: &str) -> Value {
        let script = format!("return {expression};");
        self.call(
            "POST",
            &self.at("/execute/sync"),
            &json!({"script": script, "args": []}),
        )
    }

    /// Pauses the film that plays, and seeks to its middle, which is at this second, by a click on the bar; how near that leads is told by the bar's width.
    pub fn pause_and_seek(&self, middle: f64, within: f64) {
        let player = "document.querySelector('#player')";
        self.click("#play");
        self.until(&format!("{player}.paused"));
        let still = self.eval(&format!("{player}.currentTime"));
        assert_eq!(self.eval(&format!("{player}.currentTime")), still);
        self.click("#bar");
        self.until(&format!(
            "Math.abs({player}.currentTime - {middle}) < {within} && !{player}.seeking && {player}.readyState > 2"
        ));
    }

    /// Waits until an expression is true.
    pub fn until(&self, expression: &str) {
        let began = std::time::Instant::now();
        while self.eval(expression) != Value::Bool(true) {
            if began.elapsed() > Duration::from_mins(1) {
                let page = self.eval("document.body.innerText");
                let video = self.eval(
                    "(v => v && [v.currentTime, v.duration, v.paused, v.readyState, v.error && v.error.message])(document.querySelector('#player'))",
                );
                panic!("in vain: {expression}: {video} {page}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if !self.session.is_empty() && !std::thread::panicking() {
            // Ends Chromium, too.
            self.call("DELETE", &self.at(""), &Value::Null);
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

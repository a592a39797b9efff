//! The HTTP proxy: a server's titles, for browsers and players on the viewer's host (thesis 6.4.1).
//!
//! Files are served unchanged, with ranges; live streams and fragmented files as HLS; and a page lists, plays and seeks. Each streaming
//! request has a thread of the runtime's blocking pool, which fetches no faster than the player reads.

mod admission;
mod feed;
mod pool;
mod range;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

pub use self::pool::{Open, Server};

use self::admission::UserFilter;
use self::feed::{Feed, Item};
use self::pool::Pool;
use self::range::{Wanted, wanted};
use crate::client::{OpenError, ViewError, Viewer};
use crate::names;
use crate::wire::{Content, Denial, Refusal};
use weft_service::lock;

/// Requests that stream at the same time.
const STREAMS: usize = 256;
/// Live streams that are followed at the same time.
const FEEDS: usize = 64;
/// How long a playlist waits for its first segment.
const FIRST_SEGMENT: Duration = Duration::from_secs(15);

const PAGE: &str = include_str!("../../assets/index.html");
const SCRIPT: &str = include_str!("../../assets/page.js");
const STYLE: &str = include_str!("../../assets/page.css");
const HLS: &[u8] = include_bytes!("../../assets/hls.light.min.js");

pub struct Config {
    /// Address and port; port 0 takes a free one.
    pub http: SocketAddr,
    /// Whether any user may connect who can reach the address; otherwise only this user, on this host.
    pub open: bool,
    pub servers: Vec<Server>,
}

/// A proxy that listens.
pub struct Proxy {
    runtime: tokio::runtime::Runtime,
    listener: TcpListener,
    open: bool,
    app: Arc<App>,
}

struct App {
    pools: Vec<Arc<Pool>>,
    feeds: Mutex<HashMap<(usize, String), Arc<Feed>>>,
    streams: Arc<Semaphore>,
}

impl Proxy {
    /// Listens.
    ///
    /// # Errors
    /// As `bind(2)`; without threads or descriptors.
    pub fn bind(config: Config) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(STREAMS + FEEDS + 16)
            .build()?;
        let listener = runtime.block_on(TcpListener::bind(config.http))?;
        let pools = config.servers.into_iter().map(Pool::new).map(Arc::new);
        Ok(Self {
            runtime,
            listener,
            open: config.open,
            app: Arc::new(App {
                pools: pools.collect(),
                feeds: Mutex::default(),
                streams: Arc::new(Semaphore::new(STREAMS)),
            }),
        })
    }

    /// The address, with the port that was chosen.
    ///
    /// # Errors
    /// As `getsockname(2)`.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves for ever.
    ///
    /// # Errors
    /// [`io::Error`] when the listener fails.
    pub fn run(self) -> io::Result<()> {
        let asset = |kind: &'static str, bytes: &'static [u8]| {
            get(move || async move { ([(header::CONTENT_TYPE, kind)], bytes) })
        };
        let routes = Router::new()
            .route("/", asset("text/html; charset=utf-8", PAGE.as_bytes()))
            .route("/page.js", asset("text/javascript", SCRIPT.as_bytes()))
            .route("/page.css", asset("text/css", STYLE.as_bytes()))
            .route("/hls.js", asset("text/javascript", HLS))
            .route("/api/titles", get(titles))
            .route("/api/stats", get(stats))
            .route("/media/{server}/{*name}", get(media))
            .route("/hls/{server}/{*item}", get(hls))
            .layer(middleware::from_fn(guard))
            .with_state(Arc::clone(&self.app));
        let admitted = UserFilter::new(self.listener, self.open);
        let app = self.app;
        self.runtime.block_on(async move {
            tokio::spawn(async move {
                loop {
                    tokio::time::sleep(Duration::from_secs(2)).await;
                    app.pools.iter().for_each(|pool| pool.tidy());
                    lock(&app.feeds).retain(|_, feed| !feed.is_over());
                }
            });
            axum::serve(admitted, routes).await
        })
    }
}

/// Refuses requests by DNS rebinding: a page of another site whose name has been made to resolve to this address. No other site may
/// embed these pages.
async fn guard(request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST);
    let host = host.and_then(|h| h.to_str().ok()).unwrap_or_default();
    if !is_address(host) {
        let text = "use the proxy's address, or localhost: names of hosts are not answered\n";
        return (StatusCode::MISDIRECTED_REQUEST, text).into_response();
    }
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    for (name, value) in [
        ("x-content-type-options", "nosniff"),
        ("cross-origin-resource-policy", "same-origin"),
        ("referrer-policy", "no-referrer"),
        (
            "content-security-policy",
            "default-src 'self'; media-src 'self' blob:; frame-ancestors 'none'",
        ),
    ] {
        headers.insert(
            HeaderName::from_static(name),
            HeaderValue::from_static(value),
        );
    }
    response
}

/// Whether a `Host` header is an address, or `localhost`.
fn is_address(host: &str) -> bool {
    if host.parse::<SocketAddr>().is_ok() || host.parse::<IpAddr>().is_ok() {
        return true;
    }
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let inner = name.strip_prefix('[').and_then(|n| n.strip_suffix(']'));
    name == "localhost" || inner.is_some_and(|n| n.parse::<IpAddr>().is_ok())
}

type Shared = State<Arc<App>>;

/// Runs blocking code on the blocking pool.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Response> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| {
        answer(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the request could not be served",
        )
    })
}

fn answer(status: StatusCode, text: impl std::fmt::Display) -> Response {
    (status, format!("{text}\n")).into_response()
}

fn json(value: &serde_json::Value) -> Response {
    let headers = [(header::CONTENT_TYPE, "application/json")];
    (headers, value.to_string()).into_response()
}

fn open_failed(e: &OpenError) -> Response {
    let status = match e {
        OpenError::Refused(Refusal::NoSuchTitle | Refusal::Malformed) => StatusCode::NOT_FOUND,
        OpenError::Refused(Refusal::UnknownPeer) => StatusCode::FORBIDDEN,
        OpenError::Refused(_) => StatusCode::SERVICE_UNAVAILABLE,
        OpenError::Local(_) => StatusCode::INTERNAL_SERVER_ERROR,
        OpenError::Connect(_) | OpenError::Protocol(_) => StatusCode::BAD_GATEWAY,
    };
    answer(status, e)
}

async fn titles(State(app): Shared) -> Response {
    let mut servers = Vec::new();
    for (index, pool) in app.pools.iter().enumerate() {
        let asked = Arc::clone(pool);
        let listed = match blocking(move || asked.catalogue()).await {
            Ok(listed) => listed,
            Err(response) => return response,
        };
        servers.push(match listed {
            Ok(titles) => {
                serde_json::json!({"server": index, "label": pool.label(), "titles": titles})
            }
            Err(e) => serde_json::json!({"server": index, "label": pool.label(), "titles": [], "error": e}),
        });
    }
    json(&serde_json::Value::from(servers))
}

async fn stats(State(app): Shared) -> Response {
    let servers: Vec<_> = app
        .pools
        .iter()
        .map(|pool| {
            let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
            serde_json::json!({
                "label": pool.label(),
                "bytes": get(&pool.counters.bytes),
                "requests": get(&pool.counters.requests),
                "streams": get(&pool.counters.streams),
            })
        })
        .collect();
    let feeds: Vec<_> = lock(&app.feeds)
        .iter()
        .map(|((server, name), feed)| {
            serde_json::json!({
                "server": server,
                "name": name,
                "skipped": feed.skipped.load(Ordering::Relaxed),
                "delay_us": feed.delay.load(Ordering::Relaxed),
            })
        })
        .collect();
    json(&serde_json::json!({"servers": servers, "feeds": feeds}))
}

fn etag(viewer: &Viewer) -> String {
    let version = viewer.grant().version;
    format!("\"{:032x}\"", u128::from_be_bytes(version))
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

async fn media(
    State(app): Shared,
    method: Method,
    Path((server, name)): Path<(usize, String)>,
    headers: HeaderMap,
) -> Response {
    let Some(pool) = app.pools.get(server).cloned() else {
        return answer(StatusCode::NOT_FOUND, "there is no such server");
    };
    if names::check(&name).is_err() {
        return answer(StatusCode::NOT_FOUND, names::BadName);
    }
    let Ok(permit) = Arc::clone(&app.streams).try_acquire_owned() else {
        return answer(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many streams at the same time",
        );
    };
    let (asked, title) = (Arc::clone(&pool), name.clone());
    let viewer = match blocking(move || asked.take(&title)).await {
        Ok(Ok(viewer)) => viewer,
        Ok(Err(e)) => return open_failed(&e),
        Err(response) => return response,
    };
    if !viewer.grant().content.is_movie() {
        return answer(
            StatusCode::NOT_FOUND,
            "a live stream has a playlist and is no file",
        );
    }
    pool.counters.requests.fetch_add(1, Ordering::Relaxed);
    let (len, tag) = (viewer.grant().len, etag(&viewer));
    let kind = names::media_type(&name).unwrap_or("application/octet-stream");
    let mut out = HeaderMap::new();
    let mut set = |name: HeaderName, value: String| {
        if let Ok(value) = HeaderValue::from_str(&value) {
            out.insert(name, value);
        }
    };
    set(header::ETAG, tag.clone());
    set(header::ACCEPT_RANGES, "bytes".into());
    set(header::CONTENT_TYPE, kind.into());
    // A file that was replaced has another tag: a player has to ask.
    set(header::CACHE_CONTROL, "no-cache".into());
    let matches = text(&headers, &header::IF_NONE_MATCH).is_some_and(|tags| {
        tags.split(',')
            .any(|t| matches!(t.trim(), t if t == tag || t == "*"))
    });
    if matches {
        pool.put(&name, viewer);
        return (StatusCode::NOT_MODIFIED, out).into_response();
    }
    let same = text(&headers, &header::IF_RANGE).is_none_or(|t| t.trim() == tag);
    let range = text(&headers, &header::RANGE).filter(|_| same);
    let (status, from, to) = match wanted(range, len) {
        Wanted::Whole => (StatusCode::OK, 0, len),
        Wanted::Part(from, to) => {
            set(
                header::CONTENT_RANGE,
                format!("bytes {from}-{}/{len}", to - 1),
            );
            (StatusCode::PARTIAL_CONTENT, from, to)
        }
        Wanted::Unsatisfiable => {
            set(header::CONTENT_RANGE, format!("bytes */{len}"));
            pool.put(&name, viewer);
            return (StatusCode::RANGE_NOT_SATISFIABLE, out).into_response();
        }
    };
    set(header::CONTENT_LENGTH, (to - from).to_string());
    if method == Method::HEAD {
        pool.put(&name, viewer);
        return (status, out, Body::empty()).into_response();
    }
    let (sender, receiver) = mpsc::channel(2);
    tokio::task::spawn_blocking(move || stream(&pool, &name, viewer, from, to, &sender, permit));
    let body = Body::new(Pieces {
        receiver,
        left: to - from,
    });
    (status, out, body).into_response()
}

/// Fetches a range as fast as the player reads it. That a player has left is noticed at the next piece.
fn stream(
    pool: &Pool,
    name: &str,
    mut viewer: Viewer,
    from: u64,
    to: u64,
    sender: &mpsc::Sender<Result<Bytes, io::Error>>,
    _permit: OwnedSemaphorePermit,
) {
    pool.counters.streams.fetch_add(1, Ordering::Relaxed);
    let version = viewer.grant().version;
    let mut at = from;
    let mut again = true;
    let outcome = loop {
        match pieces(pool, &mut viewer, &mut at, to, sender) {
            // A kept connection may have ended meanwhile: another one with the same content continues, once.
            Err(Some(e)) if again && !matches!(e, ViewError::Denied(Denial::Changed)) => {
                again = false;
                match pool.open(name) {
                    Ok(new) if new.grant().version == version => viewer = new,
                    _ => break Err(Some(e)),
                }
            }
            outcome => break outcome,
        }
    };
    pool.counters.streams.fetch_sub(1, Ordering::Relaxed);
    match outcome {
        Ok(()) | Err(None) => pool.put(name, viewer),
        Err(Some(e)) => {
            tracing::info!("{name}: {e}");
            let _ = sender.blocking_send(Err(io::Error::other(e)));
        }
    }
}

/// Sends pieces; `Err(None)` when the player has left.
fn pieces(
    pool: &Pool,
    viewer: &mut Viewer,
    at: &mut u64,
    to: u64,
    sender: &mpsc::Sender<Result<Bytes, io::Error>>,
) -> Result<(), Option<ViewError>> {
    let mut range = viewer.range(*at, to);
    while let Some(piece) = range.next()? {
        let mut bytes = Vec::with_capacity(piece.len as usize);
        range.append(&piece, &mut bytes)?;
        sender.blocking_send(Ok(bytes.into())).map_err(|_| None)?;
        pool.count(piece.len.into());
        *at += u64::from(piece.len);
    }
    Ok(())
}

/// The body of a response.
struct Pieces {
    receiver: mpsc::Receiver<Result<Bytes, io::Error>>,
    left: u64,
}

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, io::Error>>> {
        self.receiver.poll_recv(context).map(|piece| match piece {
            Some(Ok(bytes)) => {
                self.left = self.left.saturating_sub(bytes.len() as u64);
                Some(Ok(http_body::Frame::data(bytes)))
            }
            Some(Err(e)) => Some(Err(e)),
            // The thread has panicked.
            None if self.left > 0 => Some(Err(io::ErrorKind::UnexpectedEof.into())),
            None => None,
        })
    }

    fn size_hint(&self) -> http_body::SizeHint {
        http_body::SizeHint::with_exact(self.left)
    }
}

/// A path segment or name as a part of a URL.
fn encode(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for &byte in name.as_bytes() {
        if byte.is_ascii_alphanumeric() || b"/-_.~".contains(&byte) {
            out.push(byte.into());
        } else {
            out.extend(['%'].into_iter().chain(
                [byte >> 4, byte & 15].map(|d| char::from(b"0123456789ABCDEF"[usize::from(d)])),
            ));
        }
    }
    out
}

async fn hls(State(app): Shared, Path((server, path)): Path<(usize, String)>) -> Response {
    let Some(pool) = app.pools.get(server).cloned() else {
        return answer(StatusCode::NOT_FOUND, "there is no such server");
    };
    let Some((name, item)) = path.rsplit_once('/') else {
        return answer(
            StatusCode::NOT_FOUND,
            "a playlist is /hls/SERVER/NAME/index.m3u8",
        );
    };
    if names::check(name).is_err() {
        return answer(StatusCode::NOT_FOUND, names::BadName);
    }
    let key = (server, name.to_owned());
    let known = lock(&app.feeds).get(&key).filter(|f| !f.is_over()).cloned();
    let feed = match known {
        Some(feed) => feed,
        None if item != "index.m3u8" => {
            return answer(
                StatusCode::NOT_FOUND,
                "nobody has asked for the playlist lately",
            );
        }
        None => {
            let (asked, title) = (Arc::clone(&pool), name.to_owned());
            let uri = format!("/media/{server}/{}", encode(name));
            let opened = blocking(move || {
                let mut viewer = asked.take(&title)?;
                if matches!(viewer.grant().content, Content::Live(_)) {
                    return Ok(Err(viewer));
                }
                let playlist = feed::file_playlist(&mut viewer, &uri);
                asked.put(&title, viewer);
                Ok(Ok(playlist))
            });
            match opened.await {
                Ok(Ok(Err(viewer))) => {
                    let mut feeds = lock(&app.feeds);
                    if feeds.len() >= FEEDS && !feeds.contains_key(&key) {
                        return answer(StatusCode::SERVICE_UNAVAILABLE, "too many live streams");
                    }
                    let old = feeds.get(&key).filter(|f| !f.is_over()).cloned();
                    old.unwrap_or_else(|| {
                        let feed = Feed::start(pool, name.into(), viewer);
                        feeds.insert(key, Arc::clone(&feed));
                        feed
                    })
                }
                Ok(Ok(Ok(Ok(playlist)))) => return item_response(Item::Playlist(playlist)),
                Ok(Ok(Ok(Err(e)))) => return answer(StatusCode::UNPROCESSABLE_ENTITY, e),
                Ok(Err(e)) => return open_failed(&e),
                Err(response) => return response,
            }
        }
    };
    match feed.item(item, FIRST_SEGMENT).await {
        Ok(item) => item_response(item),
        Err(why) if item == "index.m3u8" => answer(StatusCode::SERVICE_UNAVAILABLE, why),
        Err(why) => answer(StatusCode::NOT_FOUND, why),
    }
}

fn item_response(item: Item) -> Response {
    let (kind, cache, body) = match item {
        Item::Playlist(text) => (
            "application/vnd.apple.mpegurl",
            "no-cache",
            Body::from(text),
        ),
        Item::Segment(bytes, kind) => (kind, "max-age=60", Body::from(bytes)),
    };
    let headers = [(header::CONTENT_TYPE, kind), (header::CACHE_CONTROL, cache)];
    (headers, body).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_that_are_answered() {
        for host in [
            "localhost",
            "localhost:80",
            "127.0.0.1:8473",
            "[::1]:9",
            "::1",
            "[::1]",
            "10.0.0.1",
        ] {
            assert!(is_address(host), "{host}");
        }
        for host in [
            "",
            "example.org",
            "example.org:80",
            "localhost.example.org",
            "127.0.0.1.example.org",
            "[x]",
        ] {
            assert!(!is_address(host), "{host}");
        }
    }

    #[test]
    fn names_in_urls() {
        assert_eq!(encode("a b/ü%.mp4"), "a%20b/%C3%BC%25.mp4");
    }
}

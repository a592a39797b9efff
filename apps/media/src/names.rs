//! Names of titles: which are valid, the files that they name below a directory, and the catalogue.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags};
use serde::{Deserialize, Serialize};

/// Longest name of a title, in bytes.
pub const MAX_NAME: usize = 400;
/// Deepest directory below the one that is served.
const DEPTH: usize = 8;
/// Most titles of a catalogue.
const MOST: usize = 50_000;

/// A title, as the catalogue lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Title {
    /// Its name, as a request has it.
    pub name: String,
    /// Its length in bytes; 0 for a live stream.
    pub size: u64,
    /// When it was changed, in seconds since the epoch.
    pub modified: i64,
    /// The title of a picture of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub picture: Option<String>,
    /// Whether it is a live stream.
    #[serde(default)]
    pub live: bool,
}

/// Why a name is not valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a name is a path below the server's directory, of at most 400 bytes, without `..`, empty or hidden parts, and control characters"
)]
pub struct BadName;

/// Whether a title can have this name.
///
/// # Errors
/// [`BadName`].
pub fn check(name: &str) -> Result<(), BadName> {
    let good = name.len() <= MAX_NAME
        && !name.chars().any(char::is_control)
        && name.split('/').count() <= DEPTH
        && name
            .split('/')
            .all(|part| !part.is_empty() && !part.starts_with('.') && part.len() <= 255);
    good.then_some(()).ok_or(BadName)
}

/// The media type of a name, by its ending; `None`: it is not served.
pub fn media_type(name: &str) -> Option<&'static str> {
    let (_, ending) = name.rsplit_once('.')?;
    Some(match ending.to_ascii_lowercase().as_str() {
        "mp4" | "m4v" => "video/mp4",
        "mov" => "video/quicktime",
        "webm" => "video/webm",
        "mkv" => "video/x-matroska",
        "ts" | "m2ts" => "video/mp2t",
        "mpg" | "mpeg" => "video/mpeg",
        "avi" => "video/x-msvideo",
        "ogv" => "video/ogg",
        "m4a" => "audio/mp4",
        "mp3" => "audio/mpeg",
        "ogg" | "oga" | "opus" => "audio/ogg",
        "flac" => "audio/flac",
        "wav" => "audio/wav",
        "jpg" | "jpeg" => "image/jpeg",
        "png" => "image/png",
        "webp" => "image/webp",
        _ => return None,
    })
}

/// Opens the file of a name: no symbolic links, and nothing outside `dir`.
///
/// # Errors
/// As `open(2)`: `NotFound`, `ELOOP` for a link; `InvalidInput` for a bad name, and for a file that is not regular.
pub fn open_below(dir: BorrowedFd<'_>, name: &str) -> io::Result<File> {
    check(name).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
    let mut parts = name.split('/').peekable();
    let mut at: Option<OwnedFd> = None;
    while let Some(part) = parts.next() {
        let flags = OFlags::NOFOLLOW
            | OFlags::CLOEXEC
            | if parts.peek().is_some() {
                OFlags::PATH | OFlags::DIRECTORY
            } else {
                // NONBLOCK: it may be a FIFO.
                OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY
            };
        let from = at.as_ref().map_or(dir, AsFd::as_fd);
        at = Some(fs::openat(from, part, flags, Mode::empty())?);
    }
    let file = File::from(at.ok_or(io::ErrorKind::InvalidInput)?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        ));
    }
    Ok(file)
}

/// The titles below a directory, sorted by name; pictures of the same name (`NAME.jpg`, `.png`, `.webp`) belong to them.
///
/// # Errors
/// The directory itself cannot be read. Unreadable entries below it are left out.
pub fn list(dir: BorrowedFd<'_>) -> io::Result<Vec<Title>> {
    let mut found = Vec::new();
    walk(dir, "", 1, &mut found)?;
    found.sort_by(|a, b| a.name.cmp(&b.name));
    let is_picture = |t: &Title| media_type(&t.name).is_some_and(|kind| kind.starts_with("image/"));
    let (pictures, mut titles): (Vec<_>, Vec<_>) = found.into_iter().partition(is_picture);
    for title in &mut titles {
        let stem = title.name.rsplit_once('.').map(|(stem, _)| stem);
        let mine = |p: &&Title| p.name.rsplit_once('.').map(|(stem, _)| stem) == stem;
        title.picture = pictures.iter().find(mine).map(|p| p.name.clone());
    }
    Ok(titles)
}

fn walk(dir: BorrowedFd<'_>, prefix: &str, depth: usize, found: &mut Vec<Title>) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let opened = fs::openat(dir, ".", flags, Mode::empty())?;
    for entry in Dir::read_from(&opened)? {
        let entry = entry?;
        let Ok(part) = entry.file_name().to_str() else {
            continue;
        };
        let name = format!("{prefix}{part}");
        if check(&name).is_err() || found.len() >= MOST {
            continue;
        }
        let Ok(stat) = fs::statat(&opened, part, AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile if media_type(&name).is_some() => found.push(Title {
                name,
                size: u64::try_from(stat.st_size).unwrap_or(0),
                modified: stat.st_mtime,
                picture: None,
                live: false,
            }),
            FileType::Directory if depth < DEPTH => {
                // A directory that cannot be read hides its own titles only.
                if let Ok(below) = fs::openat(&opened, part, flags, Mode::empty()) {
                    let _ = walk(below.as_fd(), &format!("{name}/"), depth + 1, found);
                }
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_directory_lists_and_opens_what_is_below_it_and_nothing_else() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("movies");
        std::fs::create_dir_all(dir.join("series/one")).unwrap();
        for name in [
            "b.mp4",
            "b.jpg",
            "series/one/a.webm",
            "notes.txt",
            ".x.mp4",
            "../out.mp4",
        ] {
            std::fs::write(dir.join(name), name).unwrap();
        }
        symlink("../out.mp4", dir.join("link.mp4")).unwrap();
        symlink("..", dir.join("up")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, dir.join("pipe.mp4"), Mode::RWXU).unwrap();
        let fd = File::open(&dir).unwrap();
        let titles = list(fd.as_fd()).unwrap();
        let names: Vec<_> = titles.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["b.mp4", "series/one/a.webm"]);
        assert_eq!(titles[0].picture.as_deref(), Some("b.jpg"));
        assert_eq!((titles[0].size, titles[1].picture.as_deref()), (5, None));
        for (name, good) in [
            ("b.mp4", true),
            ("series/one/a.webm", true),
            ("link.mp4", false),
            ("up/out.mp4", false),
            ("../out.mp4", false),
            ("pipe.mp4", false),
            ("series", false),
            ("none.mp4", false),
            (".x.mp4", false),
        ] {
            assert_eq!(open_below(fd.as_fd(), name).is_ok(), good, "{name}");
        }
    }
}

//! The capabilities of a user's terminal: its width, whether it can redraw, and its characters.

use std::borrow::Cow;
use std::io::IsTerminal;
use std::os::fd::AsFd;

/// Columns of a terminal; `None` for a file or a pipe, whose lines may have any length.
pub fn width(out: &(impl AsFd + IsTerminal)) -> Option<u16> {
    if !out.is_terminal() {
        return None;
    }
    let told = rustix::termios::tcgetwinsize(out).map_or(0, |size| size.ws_col);
    let named = || std::env::var("COLUMNS").ok()?.parse().ok();
    Some(told).filter(|n| *n > 0).or_else(named).or(Some(80))
}

/// Columns for tables that people read: those of the terminal, and 120 in a file or a pipe. What programs read is JSON.
pub fn reading_width(out: &(impl AsFd + IsTerminal)) -> u16 {
    width(out).unwrap_or(120)
}

/// Whether written text can be overwritten: not in a file, and not on a terminal without escape sequences.
pub fn redraws(out: &impl IsTerminal) -> bool {
    out.is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// The text in characters that the user's locale has: ASCII where it names another encoding than UTF-8.
pub fn in_locale(text: &str) -> Cow<'_, str> {
    let value = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(value);
    if text.is_ascii() || locale.is_none_or(|locale| is_utf8(&locale)) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(ascii(text))
}

fn is_utf8(locale: &str) -> bool {
    let locale = locale.to_ascii_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}

fn ascii(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            _ if c.is_ascii() => plain.push(c),
            '─' | '╌' | '┄' => plain.push('-'),
            '═' => plain.push('='),
            '│' | '┆' | '╎' => plain.push('|'),
            '\u{2500}'..='\u{257f}' => plain.push('+'),
            '→' => plain.push_str("->"),
            '…' => plain.push_str("..."),
            'µ' | 'μ' => plain.push('u'),
            '²' => plain.push('2'),
            '·' => plain.push('.'),
            _ => plain.push('?'),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_in_ascii() {
        let table = "┌──┐\n│ 5 µs → … │\n╞══╡\n└──┘";
        assert_eq!(ascii(table), "+--+\n| 5 us -> ... |\n+==+\n+--+");
    }

    #[test]
    fn locales() {
        for (name, utf8) in [
            ("C", false),
            ("POSIX", false),
            ("de_DE.ISO-8859-1", false),
            ("C.UTF-8", true),
            ("en_US.utf8", true),
        ] {
            assert_eq!(is_utf8(name), utf8, "{name}");
        }
    }
}

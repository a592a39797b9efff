//! Text of others, for a terminal.

/// Whether a terminal obeys the character, or shows others in another order because of it.
pub fn is_active(c: char) -> bool {
    let directs = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || directs
}

/// One line of text that cannot drive a terminal: what is no character of a text is written as an escape.
pub fn printable(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    escape(&mut text, bytes);
    text
}

fn escape(text: &mut String, bytes: &[u8]) {
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if is_active(c) {
                text.extend(c.escape_default());
            } else {
                text.push(c);
            }
        }
        text.extend(chunk.invalid().escape_ascii().map(char::from));
    }
}

/// As [`printable`], for lines: their ends and tabs stay.
pub fn printable_lines(bytes: &[u8]) -> String {
    lines(bytes, |_| 0)
}

/// As [`printable_lines`]; the sequences that colour text stay too.
pub fn coloured_lines(bytes: &[u8]) -> String {
    lines(bytes, colour)
}

/// `kept` is the length of what stays of a sequence.
fn lines(bytes: &[u8], kept: impl Fn(&[u8]) -> usize) -> String {
    let mut text = String::with_capacity(bytes.len());
    let mut rest = bytes;
    while !rest.is_empty() {
        let plain = rest.iter().take_while(|b| !b"\n\t\x1b".contains(b)).count();
        escape(&mut text, &rest[..plain]);
        rest = &rest[plain..];
        let kept = match rest.first() {
            Some(0x1b) => kept(rest),
            Some(_) => 1,
            None => 0,
        };
        text.extend(rest[..kept].iter().copied().map(char::from));
        rest = &rest[kept..];
        if kept == 0 && !rest.is_empty() {
            escape(&mut text, &rest[..1]);
            rest = &rest[1..];
        }
    }
    text
}

/// The length of a sequence for the colour of what follows, or to erase the rest of the line in it; 0 if it is none.
fn colour(text: &[u8]) -> usize {
    let Some(body) = text.strip_prefix(b"\x1b[") else {
        return 0;
    };
    let numbers = |b: &&u8| b.is_ascii_digit() || **b == b';';
    let len = body.iter().take_while(numbers).count();
    let ends = matches!(body.get(len), Some(b'm' | b'K')) && len < 32;
    if ends { len + 3 } else { 0 }
}

/// The transport of a connection, in words.
pub fn carrier(transport: &str) -> &str {
    match transport {
        "local" => "shared memory",
        "tcp" => "TCP",
        "tls" => "TCP by TLS",
        "plain-tcp" => "plain TCP",
        "rnic" => "an RNIC",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_no_orders() {
        let said = "a\x1b[2J\n\u{9b}1m \u{7f}\u{202e}txt.exe\u{2069} ‘x’".as_bytes();
        let shown = r"a\u{1b}[2J\n\u{9b}1m \u{7f}\u{202e}txt.exe\u{2069} ‘x’";
        assert_eq!(printable(said), shown);
        assert_eq!(printable(b"\xff\x9b1m"), r"\xff\x9b1m");
    }

    #[test]
    fn lines_keep_their_ends_and_their_colours() {
        let coloured = "\x1b[01;31m\x1b[Kerror\x1b[m\n\t‘x’\n";
        assert_eq!(coloured_lines(coloured.as_bytes()), coloured);
        assert_eq!(printable_lines(b"\x1b[31mred\n\t"), "\\u{1b}[31mred\n\t");
        let said = b"\x1b]0;title\x07a\x1b[2Jb\x1b";
        assert_eq!(
            coloured_lines(said),
            r"\u{1b}]0;title\u{7}a\u{1b}[2Jb\u{1b}"
        );
        assert_eq!(printable_lines(b"\x9b\n\x9b"), "\\x9b\n\\x9b");
    }
}

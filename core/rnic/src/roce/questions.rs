//! How many questions a port asks its siblings.

/// Questions of each kind to all siblings in a second: any host can send what they are about, and each of them wakes all processes. Peers repeat.
const MOST_QUESTIONS: u32 = 256;

/// How many questions there were in this second: about services, and about rejections.
#[derive(Default)]
pub(super) struct Questions {
    second: u64,
    asked: [u32; 2],
}

impl Questions {
    /// Whether one more may be asked.
    pub(super) fn admit(&mut self, second: u64, about_rejection: bool) -> bool {
        if self.second != second {
            (self.second, self.asked) = (second, [0; 2]);
        }
        let asked = &mut self.asked[usize::from(about_rejection)];
        *asked += u32::from(*asked <= MOST_QUESTIONS);
        *asked <= MOST_QUESTIONS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_counted_by_kind_and_second() {
        let mut questions = Questions::default();
        let admitted = |questions: &mut Questions, second, about| {
            (0..1000).filter(|_| questions.admit(second, about)).count()
        };
        for second in [0, 5] {
            for about in [false, true, false] {
                let first = questions.asked[usize::from(about)] == 0 || questions.second != second;
                let most = if first { MOST_QUESTIONS as usize } else { 0 };
                assert_eq!(admitted(&mut questions, second, about), most);
            }
        }
    }
}

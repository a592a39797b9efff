//! Enumerations with a word for each case.

/// An enumeration whose cases have the same word on the command line, in JSON and from `name`.
#[macro_export]
macro_rules! named {
    ($(#[$meta:meta])* $vis:vis enum $name:ident {
        $($(#[$case_meta:meta])* $case:ident = $word:literal),* $(,)?
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize, clap::ValueEnum)]
        $vis enum $name {
            $($(#[$case_meta])* #[serde(rename = $word)] #[value(name = $word)] $case),*
        }

        impl $name {
            /// The word for it.
            $vis fn name(self) -> &'static str {
                match self {
                    $(Self::$case => $word),*
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}
pub use named;

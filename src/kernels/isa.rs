//! Which instruction set the kernels use.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::error::{Error, Result};

/// An instruction set that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, on every CPU.
    Scalar,
    /// AVX2 with FMA and F16C: x86-64 since Haswell (2013) and Zen (2017).
    Avx2,
}

/// Overrides the choice of instruction set at start.
const VARIABLE: &str = "PAGED_KV_ISA";

/// Index into [`Isa::ALL`] plus one; 0 until someone chose.
static CHOSEN: AtomicU8 = AtomicU8::new(0);

impl Isa {
    /// Every instruction set, slowest first.
    pub const ALL: [Self; 2] = [Self::Scalar, Self::Avx2];

    /// The name that [`set_isa`] and `PAGED_KV_ISA` take.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
        }
    }

    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            Self::Avx2 => false,
        }
    }

    /// The fastest that this CPU has.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Self::Scalar)
    }

    /// The process's choice: of [`set_isa`], else of `PAGED_KV_ISA`, else the fastest.
    ///
    /// # Errors
    /// [`Error::Value`] where `PAGED_KV_ISA` names one that is unknown or that this CPU lacks.
    pub fn current() -> Result<Self> {
        // Relaxed: the number stands for itself, nothing is published with it.
        match CHOSEN.load(Ordering::Relaxed) {
            0 => {
                static AT_START: OnceLock<Result<Isa>> = OnceLock::new();
                AT_START
                    .get_or_init(|| match std::env::var(VARIABLE) {
                        Ok(name) if !name.is_empty() => name.parse(),
                        _ => Ok(Self::detect()),
                    })
                    .clone()
            }
            n => Ok(Self::ALL[usize::from(n) - 1]),
        }
    }
}

/// Makes every later call of the process use the named instruction set.
///
/// # Errors
/// [`Error::Value`] for a name that is unknown or an instruction set that this CPU lacks.
pub fn set_isa(name: &str) -> Result<()> {
    let isa: Isa = name.parse()?;
    let index = Isa::ALL.iter().position(|&other| other == isa).unwrap_or(0);
    // Relaxed: see `current`.
    CHOSEN.store(index as u8 + 1, Ordering::Relaxed);
    Ok(())
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = Error;

    /// Only an instruction set that this CPU has can be named.
    fn from_str(name: &str) -> Result<Self> {
        let names = |list: &[Self]| list.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ");
        let Some(isa) = Self::ALL.into_iter().find(|isa| isa.name() == name) else {
            return Err(Error::Value(format!("ISA {name:?} is not one of {}", names(&Self::ALL))));
        };
        if isa.is_available() {
            return Ok(isa);
        }
        let here: Vec<_> = Self::ALL.into_iter().filter(|isa| isa.is_available()).collect();
        Err(Error::Value(format!("this CPU lacks {name}; it has {}", names(&here))))
    }
}

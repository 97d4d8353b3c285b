//! Which instruction set the kernels use.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

#[cfg(target_arch = "aarch64")]
use super::aarch64::Neon;
use super::scalar::Scalar;
#[cfg(target_arch = "x86_64")]
use super::x86_64::{Avx2, Avx512, BF16, PLAIN};
use crate::error::{Error, Result};

/// An instruction set that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, on every CPU.
    Scalar,
    /// NEON: every 64-bit Arm.
    Neon,
    /// AVX2 with FMA and F16C: x86-64 since Haswell (2013) and Zen (2017).
    Avx2,
    /// AVX-512 F, BW, DQ and VL: x86-64 servers since Skylake (2017) and Zen 4 (2022).
    Avx512,
    /// AVX-512 with BF16 and VBMI: since Sapphire Rapids (2023) and Zen 4 (2022).
    Avx512Bf16,
}

/// An instruction set that this CPU is known to have: what dispatch goes by.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Level {
    Scalar(Scalar),
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512<PLAIN>),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(Avx512<BF16>),
}

/// Evaluates an expression with a level's proof: the one point where code becomes that of an
/// instruction set.
macro_rules! dispatch {
    ($level:expr, $simd:ident => $run:expr) => {
        match $level {
            $crate::kernels::isa::Level::Scalar($simd) => $run,
            #[cfg(target_arch = "aarch64")]
            $crate::kernels::isa::Level::Neon($simd) => $run,
            #[cfg(target_arch = "x86_64")]
            $crate::kernels::isa::Level::Avx2($simd) => $run,
            #[cfg(target_arch = "x86_64")]
            $crate::kernels::isa::Level::Avx512($simd) => $run,
            #[cfg(target_arch = "x86_64")]
            $crate::kernels::isa::Level::Avx512Bf16($simd) => $run,
        }
    };
}
pub(super) use dispatch;

/// Overrides the choice of instruction set at start.
const VARIABLE: &str = "PAGED_KV_ISA";

/// Index into [`Isa::ALL`] plus one; 0 until someone chose.
static CHOSEN: AtomicU8 = AtomicU8::new(0);

impl Isa {
    /// Every instruction set; of those of one architecture, the slowest first.
    pub const ALL: [Self; 5] = [Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512, Self::Avx512Bf16];

    /// The name that [`set_isa`] and `PAGED_KV_ISA` take.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512_bf16",
        }
    }

    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        self.proof().is_some()
    }

    /// Proof that this CPU has it, if it has.
    fn proof(self) -> Option<Level> {
        match self {
            Self::Scalar => Some(Level::Scalar(Scalar)),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => Neon::new().map(Level::Neon),
            #[cfg(not(target_arch = "aarch64"))]
            Self::Neon => None,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Avx2::new().map(Level::Avx2),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Avx512::new().map(Level::Avx512),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Avx512::new().map(Level::Avx512Bf16),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Avx512Bf16 => None,
        }
    }

    /// Proof that this CPU has it.
    ///
    /// # Errors
    /// [`Error::Value`] where it doesn't.
    pub(crate) fn level(self) -> Result<Level> {
        self.proof().ok_or_else(|| {
            let here = Self::ALL.into_iter().filter(|isa| isa.is_available()).map(Self::name);
            let here: Vec<_> = here.collect();
            Error::Value(format!("this CPU lacks {self}; it has {}", here.join(", ")))
        })
    }

    /// The fastest that this CPU has.
    pub fn detect() -> Self {
        let pays = |isa: &Self| match isa {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Avx512::<BF16>::pays(),
            _ => true,
        };
        Self::ALL.into_iter().rev().filter(pays).find(|isa| isa.is_available()).unwrap_or(Self::Scalar)
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
        let isa = Self::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::Value(format!("ISA {name:?} is not one of {names}"))
        })?;
        isa.level().map(|_| isa)
    }
}

/// The instruction sets to test: that of `PAGED_KV_ISA`, else all that this CPU has.
#[cfg(test)]
pub(super) fn tested() -> Vec<Level> {
    match std::env::var(VARIABLE) {
        Ok(name) => vec![name.parse::<Isa>().and_then(Isa::level).unwrap()],
        Err(_) => Isa::ALL.into_iter().filter_map(Isa::proof).collect(),
    }
}

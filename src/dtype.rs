//! Element types of keys, values and queries.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// The type of one element in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    BF16,
}

impl DType {
    /// Every type, in the order in which messages list them.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::BF16];

    /// Bytes of one element.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// The name used by numpy and torch.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    /// Takes the name alone or behind a module's (`torch.bfloat16`).
    fn from_str(text: &str) -> Result<Self, Error> {
        let name = text.rsplit('.').next().unwrap_or(text);
        Self::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            Error::Layout(format!("dtype {text:?} is not supported; one of {known}"))
        })
    }
}

/// A Rust type whose bits are those of a [`DType`].
pub trait Element: Copy + Default + Send + Sync + 'static {
    /// The type's tag.
    const DTYPE: DType;
    /// Widens to f32, exactly.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    #[inline]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for half::f16 {
    const DTYPE: DType = DType::F16;
    #[inline]
    fn to_f32(self) -> f32 {
        self.to_f32()
    }
    #[inline]
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

impl Element for half::bf16 {
    const DTYPE: DType = DType::BF16;
    #[inline]
    fn to_f32(self) -> f32 {
        self.to_f32()
    }
    #[inline]
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_with_and_without_a_module() {
        for dtype in DType::ALL {
            assert_eq!(dtype.name().parse::<DType>().unwrap(), dtype);
            assert_eq!(format!("torch.{dtype}").parse::<DType>().unwrap(), dtype);
        }
        assert!(matches!("int4".parse::<DType>(), Err(Error::Layout(_))));
    }
}

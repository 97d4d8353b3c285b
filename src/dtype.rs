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
    /// Signed 8-bit integers, which stand for their product with a scale.
    I8,
    /// Eight bits of floating point ([`F8E4M3`]), which stand for their product with a scale.
    F8E4M3,
}

impl DType {
    /// Every type, in the order in which messages list them.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::BF16, Self::I8, Self::F8E4M3];
    /// Those that stand for themselves: of queries, outputs, and keys and values on their way in.
    pub const FLOATS: [Self; 3] = [Self::F32, Self::F16, Self::BF16];

    /// Bytes of one element.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::I8 | Self::F8E4M3 => 1,
        }
    }

    /// Whether elements stand for their product with a scale: only pages have such a type.
    #[inline]
    pub const fn is_quantised(self) -> bool {
        matches!(self, Self::I8 | Self::F8E4M3)
    }

    /// The name used by numpy and torch.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::I8 => "int8",
            Self::F8E4M3 => "float8_e4m3fn",
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
        // As `half` does it, but without a branch, so that loops over rows become vector code.
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
        let quiet = bits >> 16 | 0x40;
        Self::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
    }
}

impl Element for i8 {
    const DTYPE: DType = DType::I8;
    #[inline]
    fn to_f32(self) -> f32 {
        self.into()
    }
    /// To -127..=127, both ends included for what lies beyond; NaN becomes 0.
    #[inline]
    fn from_f32(value: f32) -> Self {
        // Adding 1.5 * 2^23 leaves no bits behind the point: `round_ties_even` is a call on CPUs
        // without the instruction.
        const SHIFT: f32 = 12_582_912.0;
        let most = f32::from(Self::MAX);
        ((value.clamp(-most, most) + SHIFT) - SHIFT) as Self
    }
}

/// The bits of a `float8_e4m3fn`: a sign, four bits of exponent (bias 7), three of mantissa.
///
/// There is no infinity; 448 is the largest number, 2^-9 the smallest. Source: Micikevicius et al.,
/// "FP8 formats for deep learning" (2022).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F8E4M3(pub u8);

impl F8E4M3 {
    /// The largest number.
    pub const MAX: f32 = 448.0;
}

impl Element for F8E4M3 {
    const DTYPE: DType = DType::F8E4M3;
    #[inline]
    fn to_f32(self) -> f32 {
        let (sign, magnitude) = (u16::from(self.0 & 0x80), u16::from(self.0 & 0x7F));
        if magnitude == 0x7F {
            return f32::NAN;
        }
        // As a half: one bit of exponent more, on top, whose bias is 8 more.
        256.0 * half::f16::from_bits(sign << 8 | magnitude << 7).to_f32()
    }
    /// To the largest number what lies beyond it.
    #[inline]
    fn from_f32(value: f32) -> Self {
        /// 1.5 * 2^(23 - 9): what is added to it keeps no bits below 2^-9.
        const SHIFT: f32 = 24_576.0;
        /// Exponents of a float32 count from so much less, in units of the last bit of mantissa.
        const BIAS: u32 = (127 - 7) << 3;
        if value.is_nan() {
            return Self(0x7F);
        }
        let magnitude = value.abs().min(Self::MAX);
        let code = if magnitude < 1.0 / 64.0 {
            // Below the least exponent numbers lie evenly.
            (((magnitude + SHIFT) - SHIFT) * 512.0) as u8
        } else {
            // Half of what is cut off, rounded to even; a carry into the exponent is what it must be.
            let bits = magnitude.to_bits();
            (((bits + 0x7_FFFF + (bits >> 20 & 1)) >> 20) - BIAS) as u8
        };
        Self(code | if value.is_sign_negative() { 0x80 } else { 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bits_widen_exactly_and_floats_round_to_the_nearest_of_them() {
        let all: Vec<(f32, u8)> = (0..=0x7E).map(|code| (F8E4M3(code).to_f32(), code)).collect();
        for &(value, code) in &all {
            let (exponent, mantissa) = (i32::from(code >> 3), f32::from(code & 7));
            let want = match exponent {
                0 => mantissa * 2_f32.powi(-9),
                _ => (1.0 + mantissa / 8.0) * 2_f32.powi(exponent - 7),
            };
            assert!((value - want).abs() <= 0.0, "{code}: {value}, not {want}");
            assert_eq!(F8E4M3::from_f32(value), F8E4M3(code));
            assert_eq!(F8E4M3::from_f32(-value), F8E4M3(code | 0x80));
        }
        assert!(F8E4M3(0x7F).to_f32().is_nan() && F8E4M3(0xFF).to_f32().is_nan());
        for pair in all.windows(2) {
            let [(low, below), (high, above)] = [pair[0], pair[1]];
            let middle = f32::midpoint(low, high);
            let even = if below % 2 == 0 { below } else { above };
            assert_eq!(F8E4M3::from_f32(middle), F8E4M3(even), "{middle}");
            assert_eq!(F8E4M3::from_f32(middle.next_down()), F8E4M3(below), "below {middle}");
            assert_eq!(F8E4M3::from_f32(middle.next_up()), F8E4M3(above), "above {middle}");
        }
        for beyond in [449.0, 1e9, f32::INFINITY] {
            assert_eq!(F8E4M3::from_f32(beyond), F8E4M3(0x7E));
            assert_eq!(F8E4M3::from_f32(-beyond), F8E4M3(0xFE));
        }
        assert_eq!(F8E4M3::from_f32(f32::NAN), F8E4M3(0x7F));
    }

    #[test]
    fn integers_round_to_even_and_stop_at_127() {
        for (value, want) in [(0.5, 0), (1.5, 2), (-2.5, -2), (126.6, 127), (-127.4, -127), (1e9, 127)] {
            assert_eq!(<i8 as Element>::from_f32(value), want, "{value}");
        }
        assert_eq!(<i8 as Element>::from_f32(-f32::INFINITY), -127);
        assert_eq!(<i8 as Element>::from_f32(f32::NAN), 0);
    }

    #[test]
    fn names_round_trip_with_and_without_a_module() {
        for dtype in DType::ALL {
            assert_eq!(dtype.name().parse::<DType>().unwrap(), dtype);
            assert_eq!(format!("torch.{dtype}").parse::<DType>().unwrap(), dtype);
        }
        assert!(matches!("int4".parse::<DType>(), Err(Error::Layout(_))));
    }

    #[test]
    fn bfloat16_round_as_half_does_it() {
        let ties = (0..=u32::MAX).step_by(1 << 15);
        for bits in (0..=u32::MAX).step_by(4099).chain(ties).chain([0x7F80_0001, u32::MAX]) {
            let value = f32::from_bits(bits);
            let want = half::bf16::from_f32(value).to_bits();
            assert_eq!(<half::bf16 as Element>::from_f32(value).to_bits(), want, "{bits:#x}");
        }
    }
}

//! The head slopes of `ALiBi`.

/// Slopes of Press, Smith and Lewis, "Train Short, Test Long" (ICLR 2022), one per query head.
///
/// For `n` heads, a power of two: `2^(-8/n), 2^(-16/n), …, 2^-8`. Otherwise those of the power of
/// two below, followed by every other slope of the power of two above, as in their code.
pub fn alibi_slopes(num_heads: usize) -> Vec<f32> {
    let geometric = |n: usize| move |i: usize| (-8.0 * (i + 1) as f64 / n as f64).exp2() as f32;
    if num_heads == 0 {
        return Vec::new();
    }
    let below = 1 << num_heads.ilog2();
    (0..below)
        .map(geometric(below))
        .chain((0..below).map(|i| 2 * i).map(geometric(2 * below)))
        .take(num_heads)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::alibi_slopes;

    #[test]
    fn field_c62_slopes_follow_press_et_al() {
        assert_eq!(
            alibi_slopes(8),
            [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015_625, 0.007_812_5, 0.003_906_25]
        );
        // 12 heads: the 8 above, then 2^-0.5, 2^-1.5, 2^-2.5, 2^-3.5.
        let twelve = alibi_slopes(12);
        assert_eq!(twelve[..8], alibi_slopes(8));
        for (i, slope) in twelve[8..].iter().enumerate() {
            assert!((slope - 2_f32.powf(-0.5 - i as f32)).abs() < 1e-7, "{slope}");
        }
        assert_eq!(alibi_slopes(1), [2_f32.powi(-8)]);
        assert!(alibi_slopes(0).is_empty());
    }
}

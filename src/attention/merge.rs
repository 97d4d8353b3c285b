//! Joining two attention results over disjoint sets of keys.

use crate::error::{Error, Result};
use crate::kernels::{load_row, store_row};
use crate::storage::{RowsView, RowsViewMut};

/// Joins results over two disjoint sets of keys into the result over their union, exactly as if it
/// had been computed at once.
///
/// `out_a`, `out_b`, `out`: `[tokens, num_heads, v_head_dim]`, any dtypes; `lse_a`, `lse_b`, `lse`:
/// `[tokens * num_heads]`, natural logarithm. A side with `lse` -inf saw no key: it counts for
/// nothing, whatever its output holds. Give sinks to one side only, they count in `lse`.
///
/// # Errors
/// [`Error::Layout`] where shapes or lengths differ; nothing is written then.
pub fn merge_states(
    out_a: RowsView,
    lse_a: &[f32],
    out_b: RowsView,
    lse_b: &[f32],
    out: &mut RowsViewMut,
    lse: &mut [f32],
) -> Result<()> {
    let [tokens, num_heads, dim] = out.shape();
    if out_a.shape() != out.shape() || out_b.shape() != out.shape() {
        return Err(Error::Layout(format!(
            "merge_states: out_a {:?}, out_b {:?} and out {:?} must have one shape",
            out_a.shape(),
            out_b.shape(),
            out.shape()
        )));
    }
    let rows = tokens * num_heads;
    if [lse_a.len(), lse_b.len(), lse.len()] != [rows; 3] {
        return Err(Error::Layout(format!(
            "merge_states: {tokens} tokens of {num_heads} heads need {rows} lse, not {}, {} and {}",
            lse_a.len(),
            lse_b.len(),
            lse.len()
        )));
    }
    let (mut a, mut b) = (vec![0.0; dim], vec![0.0; dim]);
    for row in 0..rows {
        let (token, head) = (row / num_heads, row % num_heads);
        let (weight_a, weight_b, joined) = weights(lse_a[row], lse_b[row]);
        load_row(&out_a, token, head, &mut a);
        load_row(&out_b, token, head, &mut b);
        for (a, &b) in a.iter_mut().zip(&b) {
            // A weight of zero must win over NaN or infinity in the other side's output.
            let a_part = if weight_a == 0.0 { 0.0 } else { weight_a * *a };
            *a = if weight_b == 0.0 { a_part } else { a_part + weight_b * b };
        }
        store_row(out, token, head, &a);
        lse[row] = joined;
    }
    Ok(())
}

/// The share of each side, and the logarithm of the joined sum.
fn weights(lse_a: f32, lse_b: f32) -> (f32, f32, f32) {
    if lse_a == f32::NEG_INFINITY || lse_b == f32::NEG_INFINITY {
        let share = |lse: f32| if lse == f32::NEG_INFINITY { 0.0 } else { 1.0 };
        let joined = if lse_a == f32::NEG_INFINITY { lse_b } else { lse_a };
        return (share(lse_a), share(lse_b), joined);
    }
    let (a, b) = (f64::from(lse_a), f64::from(lse_b));
    let max = a.max(b);
    let (exp_a, exp_b) = ((a - max).exp(), (b - max).exp());
    let sum = exp_a + exp_b;
    ((exp_a / sum) as f32, (exp_b / sum) as f32, (max + sum.ln()) as f32)
}

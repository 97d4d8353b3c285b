//! The definition of attention, in f64 and as plain as can be: what every kernel is tested against.

use super::AttentionOptions;

/// Sizes of one sequence's arrays.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Query heads.
    pub num_heads: usize,
    /// KV heads; each serves `num_heads / num_kv_heads` query heads.
    pub num_kv_heads: usize,
    /// Elements of a query and a key.
    pub head_dim: usize,
    /// Elements of a value.
    pub v_head_dim: usize,
}

/// Attention of one sequence over dense arrays: `query` `[q, num_heads, head_dim]`, `key`
/// `[L, num_kv_heads, head_dim]`, `value` `[L, num_kv_heads, v_head_dim]`.
///
/// Returns the output `[q, num_heads, v_head_dim]` and the natural logarithm of each row's sum of
/// exponentials `[q, num_heads]`. A key that a query does not see is never read for it.
pub fn attention(
    shape: Shape,
    query: &[f32],
    key: &[f32],
    value: &[f32],
    options: &AttentionOptions,
) -> (Vec<f64>, Vec<f64>) {
    let Shape { num_heads, num_kv_heads, head_dim, v_head_dim } = shape;
    let num_queries = query.len() / (num_heads * head_dim);
    let len = key.len() / (num_kv_heads * head_dim);
    let scale = options.scale.map_or_else(|| 1.0 / (head_dim as f64).sqrt(), f64::from);
    let cap = f64::from(options.logits_soft_cap);
    let mut out = vec![0.0; num_queries * num_heads * v_head_dim];
    let mut lse = vec![f64::NEG_INFINITY; num_queries * num_heads];
    for i in 0..num_queries {
        let position = len as i64 - num_queries as i64 + i as i64;
        let sees = |k: usize| {
            (!options.causal || k as i64 <= position)
                && (options.window_left < 0 || k as i64 >= position.saturating_sub(options.window_left))
        };
        for head in 0..num_heads {
            let kv_head = head / (num_heads / num_kv_heads);
            let row = i * num_heads + head;
            let q = &query[row * head_dim..][..head_dim];
            let logits: Vec<(usize, f64)> = (0..len)
                .filter(|&k| sees(k))
                .map(|k| {
                    let key = &key[(k * num_kv_heads + kv_head) * head_dim..][..head_dim];
                    let dot: f64 = q.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                    let mut logit = dot * scale;
                    if cap > 0.0 {
                        logit = cap * (logit / cap).tanh();
                    }
                    if let Some(slopes) = options.alibi_slopes {
                        logit -= f64::from(slopes[head]) * (position - k as i64) as f64;
                    }
                    (k, logit)
                })
                .collect();
            let sink = options.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
            let max = logits.iter().fold(sink, |max, &(_, logit)| max.max(logit));
            if max == f64::NEG_INFINITY {
                continue;
            }
            let sum = (sink - max).exp() + logits.iter().map(|&(_, l)| (l - max).exp()).sum::<f64>();
            for &(k, logit) in &logits {
                let weight = (logit - max).exp() / sum;
                let value = &value[(k * num_kv_heads + kv_head) * v_head_dim..][..v_head_dim];
                for (o, &v) in out[row * v_head_dim..][..v_head_dim].iter_mut().zip(value) {
                    *o += weight * f64::from(v);
                }
            }
            lse[row] = max + sum.ln();
        }
    }
    (out, lse)
}

/*
operation_calls.h: the calls of the operations in operation_cases.h. There is no include guard: test_diffv2.cu includes
this file twice, for the CUDA operations and within namespace twin for the C operations.
*/
#define OP_X(i) ((floatX *)c->x[i].data)
#define OP_Y(i) ((floatX *)c->y[i].data)
#define OP_STAT(i) ((real *)c->y[i].data)
#define OP_DX(i) ((floatX *)c->dx[i].data)
#define OP_DW(i) ((grad_t *)c->dx[i].data) // the gradient of a parameter
#define OP_DY ((const floatX *)c->dy)

static AttentionShape op_attention_shape(const OpCase *c) {
    AttentionShape s;
    memset(&s, 0, sizeof(s));
    s.B = c->a.B, s.T = c->a.T, s.first = c->a.first, s.window = c->a.window;
    s.NQ = c->a.NQ, s.NKV = c->a.NKV, s.D = c->a.D, s.DV = c->a.DV;
    s.ldq = s.ldkv = c->a.ld;
    s.ldo = c->a.ldo;
    s.q_head = s.k_head = c->a.maps * s.D;
    s.v_head = s.DV;
    s.o_head = c->a.maps * s.DV;
    s.scale = (real)(1 / sqrt((double)s.D));
    s.first_key = c->documents ? c->index : NULL;
    return s;
}
static void op_attention_forward(const OpCase *c, int set) {
    OpKeySet a = op_key_set(&c->a, set);
    attention_forward(OP_Y(0) + a.out, c->y[1].views ? OP_STAT(1) + a.lse : NULL, OP_X(0) + a.q, OP_X(0) + a.k,
                      OP_X(0) + a.v, op_attention_shape(c));
}
static void op_attention_backward(const OpCase *c, int set, bool add_dv) {
    OpKeySet a = op_key_set(&c->a, set);
    attention_backward(OP_DX(0) + a.q, OP_DX(0) + a.k, OP_DX(0) + a.v, OP_DY + a.out, OP_Y(0) + a.out,
                       OP_STAT(1) + a.lse, OP_X(0) + a.q, OP_X(0) + a.k, OP_X(0) + a.v, op_attention_shape(c), add_dv);
}
static AttentionShape op_decode_shape(const OpCase *c) {
    AttentionShape s = op_attention_shape(c);
    s.first = 0;
    s.ldkv = c->x[1].view->ld;
    return s;
}

static HeadGroups op_groups(const OpCase *c) {
    HeadGroups g = {c->d[4], c->d[5]};
    return g;
}

static void op_forward(const OpCase *c) {
    const int *d = c->d;
    const OpAttention *a = &c->a;
    switch (c->kind) {
    case OP_EMBEDDING: embedding_forward(OP_Y(0), c->index, OP_X(0), d[0], d[2]); break;
    case OP_RMSNORM: rmsnorm_forward(OP_Y(0), OP_STAT(1), OP_X(0), OP_X(1), d[0], d[1], (real)OP_EPS, c->max); break;
    case OP_MATMUL: matmul_forward(OP_Y(0), OP_X(0), OP_X(1), d[0], d[1], d[2], d[3]); break;
    case OP_ROPE: rope_forward(OP_Y(0), (const real *)c->x[1].data, d[0], d[1], d[2], d[3], d[4], c->index); break;
    case OP_ATTENTION: op_attention_forward(c, a->maps - 1); break;
    case OP_ATTENTION_SETS:
        for (int set = 0; set < 2; set++) op_attention_forward(c, set);
        break;
    case OP_SINK:
        op_attention_forward(c, 0);
        sink_forward(OP_Y(0), OP_STAT(1), d[6] ? OP_X(1) : NULL, a->B, a->T, a->NQ, a->DV);
        break;
    case OP_DIFF_COMBINE:
        diff_combine_forward(OP_Y(0), OP_X(0), OP_X(1), d[0], d[1], d[2], d[3], op_groups(c), (Factor)d[6], c->max);
        break;
    case OP_LAMBDA_EXP:
        lambda_exp_forward(OP_Y(0), OP_X(0), OP_X(0) + d[0], OP_X(1), OP_X(1) + d[0], d[0], (real)lambda_init(d[2]),
                           (size_t)d[1]);
        break;
    case OP_LAMBDA_LEARNED: lambda_learned_forward(OP_Y(0), OP_X(0), d[0], d[1], d[2]); break;
    case OP_FILL: fill_forward(OP_Y(0), (real)(d[1] / 8.0), (size_t)d[0]); break;
    case OP_SCALE: scale_inplace(OP_Y(0), (real)op_factor(c), (size_t)d[0]); break;
    case OP_ACCUMULATE: accumulate(OP_STAT(1), OP_Y(0), (size_t)d[0], d[1] != 0); break;
    case OP_CACHE_STORE: cache_store(OP_Y(0), OP_X(1), c->index, d[0], d[1], d[2], d[3], d[4]); break;
    case OP_CACHE_LOAD: cache_load(OP_Y(0), OP_X(0), d[0], d[1], d[2], d[3]); break;
    case OP_DECODE:
        attention_decode(OP_Y(0) + c->y->view->offset, c->y[1].views ? OP_STAT(1) : NULL, OP_X(0) + c->x->view->offset,
                         OP_X(1) + c->x[1].view[0].offset, OP_X(1) + c->x[1].view[1].offset, c->index, d[7],
                         op_decode_shape(c));
        break;
    case OP_QUANTIZE: quantize_inplace(OP_Y(0), d[0], d[1], d[2], d[3], d[4] != 0); break;
    case OP_ATTENTION_QUANTIZED: {
        OpKeySet set = op_key_set(a, a->maps - 1);
        attention_quantized_forward(OP_Y(0) + set.out, OP_STAT(1) + set.lse, OP_X(0) + set.q, OP_X(0) + set.k,
                                    OP_X(0) + set.v, op_attention_shape(c), d[9]);
        break;
    }
    case OP_GATE: gate_forward(OP_Y(0), OP_X(0), OP_X(1), d[0], d[1], d[2], d[3], d[4], c->max); break;
    case OP_EXCLUSIVE: exclusive_forward(OP_Y(0), OP_X(0), OP_X(1), d[0], d[1], d[2], d[3], d[4], c->max); break;
    case OP_HEAD_NORM:
        head_norm_forward(OP_Y(0), d[4] ? OP_Y(1) : NULL, OP_X(1), d[0], d[1], d[2], d[3], d[4], (real)OP_EPS);
        break;
    case OP_SWIGLU: swiglu_forward(OP_Y(0), OP_X(0), d[0], d[1], c->max); break;
    case OP_CROSS_ENTROPY: cross_entropy(OP_STAT(0), OP_X(0), c->index, d[0], d[1], d[2], 0); break;
    case OP_KIND_COUNT: break;
    }
}

static void op_backward(const OpCase *c) {
    const int *d = c->d;
    const OpAttention *a = &c->a;
    switch (c->kind) {
    case OP_EMBEDDING: embedding_backward(OP_DW(0), OP_DY, c->index, d[0], d[2]); break;
    case OP_RMSNORM:
        rmsnorm_backward(OP_DX(0), OP_DW(1), OP_DY, OP_X(0), OP_X(1), OP_STAT(1), d[0], d[1], d[3] != 0, c->max);
        break;
    case OP_MATMUL:
        matmul_backward(OP_DX(0), OP_DW(1), OP_DY, OP_X(0), OP_X(1), d[0], d[1], d[2], d[3], d[4] != 0);
        break;
    case OP_ROPE: rope_backward(OP_DX(0), (const real *)c->x[1].data, d[0], d[1], d[2], d[3], d[4], c->index); break;
    case OP_ATTENTION: op_attention_backward(c, a->maps - 1, c->x[0].view[2].adds); break;
    case OP_ATTENTION_SETS:
        for (int set = 0; set < 2; set++) op_attention_backward(c, set, set > 0);
        break;
    case OP_SINK:
        if (d[6]) sink_backward(OP_DW(1), OP_DY, OP_Y(0), OP_STAT(1), OP_X(1), a->B, a->T, a->NQ, a->DV);
        op_attention_backward(c, 0, false);
        break;
    case OP_DIFF_COMBINE:
        diff_combine_backward(OP_DX(0), OP_DX(1), OP_DY, OP_X(0), OP_X(1), d[0], d[1], d[2], d[3], op_groups(c),
                              (Factor)d[6]);
        break;
    case OP_LAMBDA_EXP:
        lambda_exp_backward(OP_DW(0), OP_DW(0) + d[0], OP_DW(1), OP_DW(1) + d[0], OP_DY, OP_X(0), OP_X(0) + d[0],
                            OP_X(1), OP_X(1) + d[0], d[0], (size_t)d[1]);
        break;
    case OP_LAMBDA_LEARNED: lambda_learned_backward(OP_DW(0), OP_DY, d[0], d[1], d[2]); break;
    case OP_SCALE: scale_inplace(OP_DX(0), (real)op_factor(c), (size_t)d[0]); break;
    case OP_GATE: gate_backward(OP_DX(0), OP_DX(1), OP_DY, OP_X(0), OP_X(1), d[0], d[1], d[2], d[3], d[4]); break;
    case OP_EXCLUSIVE:
        exclusive_backward(OP_DX(0), OP_DX(1), OP_DY, OP_X(0), OP_X(1), d[0], d[1], d[2], d[3], d[4], d[4]);
        break;
    case OP_HEAD_NORM:
        head_norm_backward(OP_DX(0), OP_DW(1), OP_Y(1), OP_X(1), d[0], d[1], d[2], d[3], d[4], (real)OP_EPS);
        break;
    case OP_SWIGLU: swiglu_backward(OP_DX(0), OP_DY, OP_X(0), d[0], d[1], c->max); break;
    case OP_CROSS_ENTROPY: cross_entropy(OP_STAT(0), OP_DX(0), c->index, d[0], d[1], d[2], (real)c->dloss); break;
    case OP_FILL:
    case OP_ACCUMULATE:
    case OP_CACHE_STORE:
    case OP_CACHE_LOAD:
    case OP_DECODE:
    case OP_QUANTIZE:
    case OP_ATTENTION_QUANTIZED:
    case OP_KIND_COUNT: break; // no backward
    }
}

static size_t op_workspace(const OpCase *c, bool backward) {
    switch (c->kind) {
    case OP_EMBEDDING: return backward ? embedding_workspace_bytes(c->d[0]) : 0;
    case OP_RMSNORM: return backward ? rmsnorm_workspace_bytes(c->d[1]) : 0;
    case OP_HEAD_NORM: return backward ? head_norm_workspace_bytes(c->d[2]) : 0;
    case OP_MATMUL: return 0;
    case OP_ATTENTION:
    case OP_ATTENTION_SETS:
    case OP_SINK: return attention_workspace_bytes(op_attention_shape(c), omp_get_max_threads());
    case OP_DECODE: return attention_decode_workspace_bytes(op_decode_shape(c), c->d[7], omp_get_max_threads());
    default: return 0;
    }
}
static void op_rope_table(real *table, const OpCase *c) { rope_table(table, c->d[5] + c->d[1], c->d[3], OP_THETA); }
#undef OP_X
#undef OP_Y
#undef OP_STAT
#undef OP_DX
#undef OP_DW
#undef OP_DY

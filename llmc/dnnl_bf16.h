// dnnl_bf16.h: matrix products of bfloat16 with fp32 sums, through oneDNN's public C API (2.x and 3.x).
// oneDNN makes a "primitive" for a product, which usually fixes its sizes and may mean compiling code. The number of an
// expert's rows is new in every step, so the sizes stay open until the call (DNNL_RUNTIME_DIM_VAL): 8 primitives do for
// everything, and are as fast as one for each size (dev/RESULTS.md).
#ifndef LLMC_DNNL_BF16_H
#define LLMC_DNNL_BF16_H

#include "check.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if !defined(USE_DNNL)

static inline const char* bf16_product_missing(void) {
    return "this program was built without oneDNN, which bf16 needs (make deps installs it)";
}
static inline void bf16_product(bool trans_a, bool trans_b, size_t M, size_t N, size_t K, const uint16_t* a, size_t lda,
                                const uint16_t* b, size_t ldb, bool add, float* c, size_t ldc) {
    (void)trans_a, (void)trans_b, (void)M, (void)N, (void)K, (void)a, (void)lda, (void)b, (void)ldb, (void)add;
    (void)c, (void)ldc;
    fatal("%s", bf16_product_missing());
}

#else
#include <oneapi/dnnl/dnnl.h>

// Why there is no bf16 here; NULL: there is. (oneDNN would emulate it where the processor has none, slower than fp32.)
static inline const char* bf16_product_missing(void) {
    int has = (int)dnnl_get_effective_cpu_isa(), needs = (int)dnnl_cpu_isa_avx512_core_bf16; // sets of bits
    return (has & needs) == needs ? NULL : "this processor has no bf16 instructions (AVX512_BF16 or AMX)";
}

#define dnnlCheck(call) \
    do { \
        dnnl_status_t status = (call); \
        if (status != dnnl_success) { fatal("%s failed with status %d (out of memory?)", #call, (int)status); } \
    } while (0)

// 3.x has hidden what a description of a matrix looks like
#if DNNL_VERSION_MAJOR >= 3
#define DNNL_DESC(desc) (desc)
#define dnnl_matrix_init dnnl_memory_desc_create_with_strides
#define dnnl_matrix_free(desc) dnnl_memory_desc_destroy(desc)
#define dnnl_append_sum(ops) dnnl_post_ops_append_sum(ops, 1.0f, 0, dnnl_data_type_undef)
#else
#define DNNL_DESC(desc) (&(desc))
#define dnnl_matrix_init dnnl_memory_desc_init_by_strides
#define dnnl_matrix_free(desc) ((void)(desc))
#define dnnl_append_sum(ops) dnnl_post_ops_append_sum(ops, 1.0f)
#endif

// rows x columns, or (trans) the transposed of what lies in memory; ld: numbers in memory from row to row
static inline dnnl_memory_desc_t dnnl_matrix(dnnl_data_type_t type, bool trans, dnnl_dim_t rows, dnnl_dim_t columns,
                                             dnnl_dim_t ld) {
    dnnl_memory_desc_t desc;
    dnnl_dims_t dims = {rows, columns}, strides = {trans ? 1 : ld, trans ? ld : 1};
    dnnlCheck(dnnl_matrix_init(&desc, 2, dims, type, strides));
    return desc;
}

static inline dnnl_primitive_t dnnl_product_create(dnnl_engine_t engine, bool trans_a, bool trans_b, bool add) {
    const dnnl_dim_t open = DNNL_RUNTIME_DIM_VAL;
    dnnl_memory_desc_t a = dnnl_matrix(dnnl_bf16, trans_a, open, open, open);
    dnnl_memory_desc_t b = dnnl_matrix(dnnl_bf16, trans_b, open, open, open);
    dnnl_memory_desc_t c = dnnl_matrix(dnnl_f32, false, open, open, open);
    dnnl_primitive_attr_t attr;
    dnnl_primitive_desc_t desc;
    dnnl_primitive_t product;
    dnnlCheck(dnnl_primitive_attr_create(&attr));
    if (add) { // to what is there
        dnnl_post_ops_t ops;
        dnnlCheck(dnnl_post_ops_create(&ops));
        dnnlCheck(dnnl_append_sum(ops));
        dnnlCheck(dnnl_primitive_attr_set_post_ops(attr, ops));
        dnnl_post_ops_destroy(ops);
    }
#if DNNL_VERSION_MAJOR >= 3
    dnnlCheck(dnnl_matmul_primitive_desc_create(&desc, engine, a, b, NULL, c, attr));
#else
    dnnl_matmul_desc_t matmul;
    dnnlCheck(dnnl_matmul_desc_init(&matmul, &a, &b, NULL, &c));
    dnnlCheck(dnnl_primitive_desc_create(&desc, &matmul, attr, engine, NULL));
#endif
    dnnlCheck(dnnl_primitive_create(&product, desc));
    dnnl_primitive_desc_destroy(desc);
    dnnl_primitive_attr_destroy(attr);
    dnnl_matrix_free(a);
    dnnl_matrix_free(b);
    dnnl_matrix_free(c);
    return product;
}

static inline dnnl_memory_t dnnl_operand(dnnl_engine_t engine, dnnl_data_type_t type, bool trans, size_t rows,
                                         size_t columns, size_t ld, const void* numbers) {
    dnnl_memory_desc_t desc = dnnl_matrix(type, trans, (dnnl_dim_t)rows, (dnnl_dim_t)columns, (dnnl_dim_t)ld);
    dnnl_memory_t memory;
    dnnlCheck(dnnl_memory_create(&memory, DNNL_DESC(desc), engine, (void*)numbers));
    dnnl_matrix_free(desc);
    return memory;
}

// c (M,N) = op(a) (M,K) op(b) (K,N), or += (add); row-major, none of M, N, K is 0. Called from one thread it uses all of
// them; in a parallel region it runs on the caller's alone.
static inline void bf16_product(bool trans_a, bool trans_b, size_t M, size_t N, size_t K, const uint16_t* a, size_t lda,
                                const uint16_t* b, size_t ldb, bool add, float* c, size_t ldc) {
    // a thread's own: nothing says that they can be shared
    static __thread dnnl_engine_t engine;
    static __thread dnnl_stream_t stream;
    static __thread dnnl_primitive_t products[2][2][2];
    if (engine == NULL) {
        dnnlCheck(dnnl_engine_create(&engine, dnnl_cpu, 0));
        dnnlCheck(dnnl_stream_create(&stream, engine, dnnl_stream_default_flags));
    }
    dnnl_primitive_t* product = &products[trans_a][trans_b][add];
    if (*product == NULL) { *product = dnnl_product_create(engine, trans_a, trans_b, add); }
    dnnl_exec_arg_t args[3] = {{DNNL_ARG_SRC, dnnl_operand(engine, dnnl_bf16, trans_a, M, K, lda, a)},
                               {DNNL_ARG_WEIGHTS, dnnl_operand(engine, dnnl_bf16, trans_b, K, N, ldb, b)},
                               {DNNL_ARG_DST, dnnl_operand(engine, dnnl_f32, false, M, N, ldc, c)}};
    dnnlCheck(dnnl_primitive_execute(*product, stream, 3, args));
    dnnlCheck(dnnl_stream_wait(stream));
    for (int i = 0; i < 3; i++) { dnnl_memory_destroy(args[i].memory); }
}

#endif
#endif

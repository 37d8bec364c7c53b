// test_safetensors.c: safetensors.h against Hugging Face's files, its own writer, and 2,000 damaged files.
// Run from the repository's root, under the sanitizers: a reader's mistake should not survive here.
#include "testing.h"
#include "../../llmc/rand.h"
#include "../../llmc/safetensors.h"
#include <sys/resource.h>

// ----------------------------------------------------------------------------
// files made of a header text and some bytes

static char* file_path(const char* name) { return str_format("%s/%s", test_folder(), name); }

// A safetensors file whose length field is `claimed` (normally strlen(header)).
static char* make_file(const char* header, uint64_t claimed, const void* data, size_t data_size) {
    char* path = file_path("made.safetensors");
    FILE* fp = fopenCheck(path, "wb");
    fwriteCheck(&claimed, 8, 1, fp, path);
    fwriteCheck(header, 1, strlen(header), fp, path);
    fwriteCheck(data, 1, data_size, fp, path);
    fcloseCheck(fp, path);
    return path;
}

static void refused(const char* header, size_t data_size, const char* reason, int line) {
    char zeros[256] = {0};
    char err[1200] = "";
    SafeTensors st;
    char* path = make_file(header, strlen(header), zeros, data_size);
    bool ok = st_open(&st, path, err, sizeof(err));
    if (ok) { st_close(&st); }
    test_check(!ok, __FILE__, line, "accepted: %s", header);
    test_contains(err, reason, __FILE__, line);
    test_contains(err, path, __FILE__, line);
    free(path);
}

#define REFUSED(header, data_size, reason) refused(header, data_size, reason, __LINE__)

// ----------------------------------------------------------------------------
// reading what is right

static void golden_files_open_and_their_tensors_are_found(void) {
    char err[1200] = "";
    SafeTensors st;
    if (!CHECK(st_open(&st, "dev/test/goldens/mha_top2/golden.safetensors", err, sizeof(err)))) { return; }
    const StTensor* tokens = st_find(&st, "tokens");
    const StTensor* logits = st_find(&st, "logits");
    CHECK(tokens != NULL && tokens->dtype == ST_I32 && tokens->ndim == 2);
    CHECK(logits != NULL && logits->dtype == ST_F32 && logits->ndim == 3 && logits->shape[2] == 256);
    CHECK(st_find(&st, "token") == NULL && st_find(&st, "") == NULL && st_find(&st, "zzz") == NULL);
    for (size_t i = 0; i < st.count; i++) { CHECK(st_find(&st, st.tensors[i].name) == &st.tensors[i]); }
    int32_t first;
    st_to_i32(tokens, 0, 1, &first);
    CHECK(first >= 0 && first < 256);
    float value;
    EXPECT_FATAL(st_to_f32(tokens, 0, 1, &value), "I32");
    EXPECT_FATAL(st_to_i32(logits, 0, 1, &first), "F32");
    EXPECT_FATAL(st_to_f32(logits, logits->numel, 1, &value), "logits");
    st_close(&st);
}

static void unaligned_and_empty_tensors_are_read(void) { // known-faults C7
    const char* header = "{\"odd\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
                         "\"empty\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[3,3]},"
                         "\"scalar\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[3,7]},"
                         "\"wide\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[7,15]}}"; // and no __metadata__
    unsigned char data[15] = {1, 2, 3};
    float number = 2.5f;
    int64_t wide = -7;
    memcpy(data + 3, &number, 4);
    memcpy(data + 7, &wide, 8);
    char* path = make_file(header, strlen(header), data, sizeof(data));
    char err[1200] = "";
    SafeTensors st;
    if (test_check(st_open(&st, path, err, sizeof(err)), __FILE__, __LINE__, "%s", err)) {
        float value = 0;
        int32_t whole = 0;
        st_to_f32(st_find(&st, "scalar"), 0, 1, &value);
        st_to_i32(st_find(&st, "wide"), 0, 1, &whole);
        CHECK(value == 2.5f && whole == -7);
        CHECK(st_find(&st, "empty")->numel == 0 && st_find(&st, "scalar")->ndim == 0 && st.count == 4);
        st_to_f32(st_find(&st, "empty"), 0, 0, &value);
        st_close(&st);
    }
    free(path);
}

static void integers_too_wide_for_32_bits_are_named(void) {
    const char* header = "{\"tokens\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]}}";
    int64_t value = (int64_t)1 << 31;
    char* path = make_file(header, strlen(header), &value, 8);
    char err[1200] = "";
    SafeTensors st;
    int32_t out;
    CHECK(st_open(&st, path, err, sizeof(err)));
    EXPECT_FATAL(st_to_i32(st_find(&st, "tokens"), 0, 1, &out), "2147483648");
    st_close(&st);
    free(path);
}

static void half_precision_converts_exactly(void) { // known-faults C11: every one of the 65,536 values of both types
    for (uint32_t x = 0; x < 65536; x++) {
        double sign = x & 0x8000u ? -1 : 1;
        int exponent = (int)(x >> 10 & 31), mantissa = (int)(x & 1023);
        double expected = exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
        float got = f16_to_f32((uint16_t)x);
        if (exponent < 31) { CHECK((double)got == sign * expected && (signbit(got) != 0) == (sign < 0)); }
        else if (mantissa == 0) { CHECK(isinf(got) && got * sign > 0); }
        else { CHECK(isnan(got)); }
        got = bf16_to_f32((uint16_t)x);
        CHECK(isnan(got) || f32_to_bf16(got) == x); // there and back
        CHECK(!isnan(got) || isnan(bf16_to_f32(f32_to_bf16(got))));
    }
}

static void bf16_rounds_to_nearest_even(void) {
    CHECK(f32_to_bf16(1.0f + ldexpf(1, -8)) == f32_to_bf16(1.0f));                   // tie: down to even
    CHECK(bf16_to_f32(f32_to_bf16(1.0f + 3 * ldexpf(1, -8))) == 1.0f + ldexpf(1, -6)); // tie: up to even
    CHECK(bf16_to_f32(f32_to_bf16(1.0f + 1.01f * ldexpf(1, -8))) == 1.0f + ldexpf(1, -7));
    CHECK(isinf(bf16_to_f32(f32_to_bf16(3.4e38f * 1.0f))) && isinf(bf16_to_f32(f32_to_bf16(INFINITY))));
    CHECK(isnan(bf16_to_f32(f32_to_bf16(NAN))) && signbit(bf16_to_f32(f32_to_bf16(-0.0f))));
}

// ----------------------------------------------------------------------------
// writing

static void written_files_read_back(void) {
    char* path = file_path("written.safetensors");
    size_t shape[2] = {3, 5}, none[1] = {0};
    float values[15];
    int32_t whole[3] = {-1, 0, 2147483647};
    for (int i = 0; i < 15; i++) { values[i] = (float)i / 3 - 2; }
    StWriter w;
    st_writer_open(&w, path);
    st_writer_declare(&w, "f", ST_F32, 2, shape);
    st_writer_declare(&w, "i", ST_I32, 1, shape);
    st_writer_declare(&w, "none", ST_F32, 1, none);
    st_writer_declare(&w, "b", ST_BF16, 2, shape);
    st_writer_header(&w);
    st_writer_f32(&w, values, 4); // in pieces of any size
    st_writer_f32(&w, values + 4, 11);
    st_writer_data(&w, whole, sizeof(whole));
    st_writer_f32(&w, values, 15);
    st_writer_close(&w);
    SafeTensors st;
    char err[1200] = "";
    if (!test_check(st_open(&st, path, err, sizeof(err)), __FILE__, __LINE__, "%s", err)) { return; }
    float back[15];
    int32_t whole_back[3];
    st_to_f32(st_find(&st, "f"), 0, 15, back);
    CHECK(memcmp(values, back, sizeof(values)) == 0);
    st_to_i32(st_find(&st, "i"), 0, 3, whole_back);
    CHECK(memcmp(whole, whole_back, sizeof(whole)) == 0);
    st_to_f32(st_find(&st, "b"), 7, 8, back);
    for (int i = 0; i < 8; i++) { CHECK(back[i] == bf16_to_f32(f32_to_bf16(values[7 + i]))); }
    size_t data = (size_t)(st_find(&st, "f")->data - (const unsigned char*)st.map);
    CHECK(data % 8 == 0); // aligned, known-faults C7
    CHECK_CONTAINS((const char*)st.map + 8, "\"__metadata__\":{\"format\":\"pt\"}");
    st_close(&st);
    free(path);
}

static void open_and_declare(StWriter* w, const char* path, StDtype dtype, size_t n) {
    st_writer_open(w, path);
    st_writer_declare(w, "a", dtype, 1, &n);
}

static void open_and_fill(StWriter* w, const char* path, size_t declared, const float* values, size_t n) {
    open_and_declare(w, path, ST_F32, declared);
    st_writer_header(w);
    st_writer_f32(w, values, n);
}

static void misuse_of_the_writer_is_named(void) {
    char* path = file_path("misuse.safetensors");
    float values[4] = {0};
    size_t n = 4;
    StWriter w;
    EXPECT_FATAL((open_and_fill(&w, path, 4, values, 3), st_writer_close(&w)), "tensor a was not written completely");
    EXPECT_FATAL(open_and_fill(&w, path, 3, values, 4), "too many for tensor a");
    EXPECT_FATAL((open_and_declare(&w, path, ST_F32, 4), st_writer_declare(&w, "a", ST_F32, 1, &n),
                  st_writer_header(&w)), "declared twice");
    EXPECT_FATAL((open_and_declare(&w, path, ST_U8, 3), st_writer_declare(&w, "b", ST_F32, 1, &n)), "aligned");
    EXPECT_FATAL((open_and_declare(&w, path, ST_U8, 4), st_writer_declare(&w, "b\"", ST_F32, 1, &n)), "b\"");
    EXPECT_FATAL(st_writer_open(&w, "/nowhere/x.safetensors"), "/nowhere/x.safetensors");
    free(path);
}

static void write_much(const char* path) {
    float values[4096] = {0};
    size_t n = 1000 * 4096;
    StWriter w;
    open_and_declare(&w, path, ST_F32, n);
    st_writer_header(&w);
    for (int i = 0; i < 1000; i++) { st_writer_f32(&w, values, 4096); }
    st_writer_close(&w);
}

static void limit_file_size(size_t bytes) {
    struct rlimit limit = {bytes, bytes};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
}

static void a_write_that_fails_is_noticed(void) {
    char* path = file_path("much.safetensors");
    EXPECT_FATAL((limit_file_size(100000), write_much(path)), "much.safetensors");
    EXPECT_FATAL(write_much("/dev/full"), "No space left");
    free(path);
}

// ----------------------------------------------------------------------------
// reading what is wrong (known-faults C3, C4, C5)

static void lying_headers_are_refused(void) {
    REFUSED("", 0, "not valid JSON");
    REFUSED("[]", 0, "object");
    REFUSED("{} x", 0, "more bytes follow");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}", 8, "not valid JSON");
    REFUSED("{\"a\":3}", 0, "\"a\"");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "data_offsets");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]}}", 8, "shape");
    REFUSED("{\"a\":{\"dtype\":4,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "dtype");
    REFUSED("{\"a\":{\"dtype\":\"F31\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "F31");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 8, "shape");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[2.5],\"data_offsets\":[0,10]}}", 10, "shape");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[1e300],\"data_offsets\":[0,8]}}", 8, "shape");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, "overflow");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[2147483648,2147483648],\"data_offsets\":[0,0]}}", 0, "fill");
    REFUSED("{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1, "dimensions");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8, "fill");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", 8, "data_offsets");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-8,0]}}", 8, "data_offsets");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,8]}}", 8, "data_offsets");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8, "data_offsets");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[\"0\",8]}}", 8, "data_offsets");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[18446744073709551608,18446744073709551616]}}", 8,
            "data_offsets");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 7, "cut off");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 9, "1 bytes after the last tensor");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 12, "4 bytes before tensor \"a\"");
    REFUSED("{\"__metadata__\":{\"n\":1}}", 0, "__metadata__");
    REFUSED("{\"__metadata__\":\"pt\"}", 0, "__metadata__");
    REFUSED("{\"\xff\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "UTF-8");
}

static void overlaps_gaps_and_duplicates_name_the_tensor(void) {
#define TENSOR(name, range) "\"" name "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" range "}"
    REFUSED("{" TENSOR("first", "[0,4]") "," TENSOR("second", "[2,6]") "}", 6, "\"first\" and \"second\" overlap");
    REFUSED("{" TENSOR("first", "[0,4]") "," TENSOR("second", "[0,4]") "}", 4, "overlap");
    REFUSED("{" TENSOR("first", "[0,4]") "," TENSOR("second", "[6,10]") "}", 10, "2 bytes before tensor \"second\"");
    REFUSED("{" TENSOR("twin", "[0,4]") "," TENSOR("twin", "[4,8]") "}", 8, "\"twin\" stands there twice");
    REFUSED("{" TENSOR("twin", "[0,4]") "," TENSOR("tw\\u0069n", "[4,8]") "}", 8, "\"twin\" stands there twice");
    REFUSED("{\"x\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4,
            "\"dtype\" stands there twice");
#undef TENSOR
}

// A valid file with a header of exactly n bytes (spaces at its end) and one tensor.
static void header_of(uint64_t n, bool good) {
    char* path = file_path("header.safetensors");
    const char* text = "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
    size_t shown = good ? n : 1000; // the rest of a header that is too large need not exist: a hole in the file will do
    char* header = (char*)mallocCheck(shown);
    float value = 3;
    memset(header, ' ', shown);
    memcpy(header, text, strlen(text));
    FILE* fp = fopenCheck(path, "wb");
    fwriteCheck(&n, 8, 1, fp, path);
    fwriteCheck(header, 1, shown, fp, path);
    fseeko(fp, (off_t)(8 + n), SEEK_SET);
    fwriteCheck(&value, 4, 1, fp, path);
    fcloseCheck(fp, path);
    free(header);
    SafeTensors st;
    char err[1200] = "";
    bool ok = st_open(&st, path, err, sizeof(err));
    if (CHECK(ok == good) && ok) {
        float back = 0;
        st_to_f32(st_find(&st, "a"), 0, 1, &back);
        CHECK(back == 3);
    }
    if (ok) { st_close(&st); } else { CHECK_CONTAINS(err, "100 MB"); }
    remove(path);
    free(path);
}

static void headers_of_any_allowed_size_are_read(void) { // known-faults C3
    header_of(99993, true);
    header_of(100000, true);
    header_of(100008, true);
    header_of(101000000, false);
}

static void huge_header_claims_cost_no_memory(void) {
    static const uint64_t claims[] = {100000001, (uint64_t)1 << 40, (uint64_t)1 << 63, UINT64_MAX, UINT64_MAX - 7};
    for (size_t i = 0; i < sizeof(claims) / sizeof(claims[0]); i++) {
        char* path = make_file("{}", claims[i], "", 0);
        SafeTensors st;
        char err[1200] = "";
        CHECK(!st_open(&st, path, err, sizeof(err)));
        CHECK_CONTAINS(err, "100 MB");
        free(path);
    }
    char* path = make_file("{}", 99000000, "", 0); // allowed, but not there
    SafeTensors st;
    char err[1200] = "";
    CHECK(!st_open(&st, path, err, sizeof(err)));
    CHECK_CONTAINS(err, "cut off");
    free(path);
}

static void what_is_no_file_is_refused(void) {
    SafeTensors st;
    char err[1200] = "";
    CHECK(!st_open(&st, "/nowhere/x", err, sizeof(err)));
    CHECK_CONTAINS(err, "/nowhere/x: No such file");
    CHECK(!st_open(&st, test_folder(), err, sizeof(err)));
    CHECK_CONTAINS(err, "regular file");
    char* path = file_path("empty");
    test_write_file(path, "", 0);
    CHECK(!st_open(&st, path, err, sizeof(err)));
    CHECK_CONTAINS(err, "0 bytes");
    test_write_file(path, "1234567", 7);
    CHECK(!st_open(&st, path, err, sizeof(err)));
    free(path);
}

static void a_pipe_that_nobody_feeds_is_refused_at_once(void) {
    SafeTensors st;
    char err[1200] = "";
    char* path = file_path("pipe");
    if (mkfifo(path, 0600) != 0) { fatal("mkfifo: %s", strerror(errno)); }
    alarm(30); // should it wait after all, this ends the test
    CHECK(!st_open(&st, path, err, sizeof(err)));
    CHECK_CONTAINS(err, "not a regular file");
    CHECK(json_read_file(path, 1000, err, sizeof(err)) == NULL);
    CHECK_CONTAINS(err, "not a regular file");
    alarm(0);
    unlink(path);
    free(path);
}

static void deep_nesting_is_refused(void) {
    size_t n = 200000;
    char* header = (char*)mallocCheck(n + 1);
    memset(header, '[', n);
    memcpy(header, "{\"a\":", 5);
    header[n] = '\0';
    SafeTensors st;
    char err[1200] = "";
    char* path = make_file(header, n, "", 0);
    CHECK(!st_open(&st, path, err, sizeof(err)));
    CHECK_CONTAINS(err, "not valid JSON");
    free(path);
    free(header);
}

// A file of 5 GB (sparse) with the tensor of interest behind the first 4 GiB: known-faults C14.
static void tensors_beyond_4_gib_are_read(void) {
    const char* header = "{\"pad\":{\"dtype\":\"U8\",\"shape\":[5000000000],\"data_offsets\":[0,5000000000]},"
                         "\"last\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[5000000000,5000000008]}}";
    char* path = make_file(header, strlen(header), "", 0);
    float values[2] = {1.5f, -2.5f}, back[2] = {0, 0};
    int fd = open(path, O_WRONLY);
    off_t at = (off_t)(8 + strlen(header)) + 5000000000LL;
    if (CHECK(fd >= 0 && pwrite(fd, values, sizeof(values), at) == (ssize_t)sizeof(values))) {
        SafeTensors st;
        char err[1200] = "";
        if (test_check(st_open(&st, path, err, sizeof(err)), __FILE__, __LINE__, "%s", err)) {
            st_to_f32(st_find(&st, "last"), 0, 2, back);
            CHECK(back[0] == 1.5f && back[1] == -2.5f);
            st_close(&st);
        }
    }
    close(fd);
    remove(path);
    free(path);
}

// ----------------------------------------------------------------------------
// damage at random

static unsigned char* read_all(const char* path, size_t* n) {
    FILE* fp = fopenCheck(path, "rb");
    unsigned char* bytes = (unsigned char*)mallocCheck(1 << 20);
    *n = fread(bytes, 1, 1 << 20, fp);
    fclose(fp);
    return bytes;
}

// One of: flip bits, cut, extend, overwrite header text with something that bites.
static size_t damage(unsigned char* bytes, size_t n, size_t header_end, uint64_t* rng) {
    static const char* const bites[] = {"-1", "1e9", "1.5", "[[[", "null", "\"\"", "999999999999999999999", "}", ":",
                                        "\\u0000", "\xc0\xaf"};
    uint64_t kind = rng_next(rng) % 4;
    if (kind == 0) {
        for (int i = 0; i < 3; i++) { bytes[rng_next(rng) % header_end] ^= (unsigned char)(1u << rng_next(rng) % 8); }
    } else if (kind == 1) {
        return rng_next(rng) % n;
    } else if (kind == 2) {
        size_t more = 1 + rng_next(rng) % 100;
        memset(bytes + n, 7, more);
        return n + more;
    } else {
        const char* bite = bites[rng_next(rng) % (sizeof(bites) / sizeof(bites[0]))];
        memcpy(bytes + 8 + rng_next(rng) % (header_end - 40), bite, strlen(bite));
    }
    return n;
}

static void damaged_files_never_crash_the_reader(void) { // known-faults C5
    size_t n, opened = 0;
    unsigned char* whole = read_all("dev/test/goldens/tied/model.safetensors", &n);
    unsigned char* bytes = (unsigned char*)mallocCheck(n + 200);
    uint64_t header_size, rng = 1234;
    memcpy(&header_size, whole, 8);
    char* path = file_path("damaged.safetensors");
    for (int i = 0; i < 2000; i++) {
        memcpy(bytes, whole, n);
        size_t size = damage(bytes, n, (size_t)header_size + 8, &rng);
        test_write_file(path, bytes, size);
        SafeTensors st;
        char err[1200] = "";
        if (st_open(&st, path, err, sizeof(err))) { // the damage hit a name or a space: then all must be readable
            opened++;
            for (size_t t = 0; t < st.count; t++) {
                float value;
                if (st.tensors[t].dtype == ST_F32 && st.tensors[t].numel > 0) {
                    st_to_f32(&st.tensors[t], st.tensors[t].numel - 1, 1, &value);
                }
            }
            st_close(&st);
        } else {
            CHECK(err[0] != '\0' && strstr(err, path) != NULL);
        }
    }
    CHECK(opened < 800);
    free(path);
    free(bytes);
    free(whole);
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    RUN(golden_files_open_and_their_tensors_are_found);
    RUN(unaligned_and_empty_tensors_are_read);
    RUN(integers_too_wide_for_32_bits_are_named);
    RUN(half_precision_converts_exactly);
    RUN(bf16_rounds_to_nearest_even);
    RUN(written_files_read_back);
    RUN(misuse_of_the_writer_is_named);
    RUN(a_write_that_fails_is_noticed);
    RUN(lying_headers_are_refused);
    RUN(overlaps_gaps_and_duplicates_name_the_tensor);
    RUN(headers_of_any_allowed_size_are_read);
    RUN(huge_header_claims_cost_no_memory);
    RUN(what_is_no_file_is_refused);
    RUN(a_pipe_that_nobody_feeds_is_refused_at_once);
    RUN(deep_nesting_is_refused);
    RUN(tensors_beyond_4_gib_are_read);
    RUN(damaged_files_never_crash_the_reader);
    return test_summary();
}

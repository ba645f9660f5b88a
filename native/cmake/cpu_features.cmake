# Uses what this machine's processor really executes: each feature is proven by running it.
#
# Not -march=native: virtual machines advertise features that fault (AMX, seen at ldtilecfg). AMX stays off: it moves
# weights into a buffer type of its own, and packed experts would not use it.
include(CheckCSourceRuns)

set(EXPERT_PACK_CPU_FEATURES "")
if (NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    return() # other architectures: upstream's own detection
endif()
set(GGML_NATIVE OFF)

function(prove_cpu_feature name flags body)
    set(CMAKE_REQUIRED_FLAGS "-O1 ${flags}")
    check_c_source_runs("
        #include <immintrin.h>
        int main(int argc, char ** argv) { (void) argv; ${body} }" HAVE_${name})
    if (HAVE_${name})
        set(GGML_${name} ON PARENT_SCOPE)
        set(EXPERT_PACK_CPU_FEATURES ${EXPERT_PACK_CPU_FEATURES} ${name} PARENT_SCOPE)
    else()
        set(GGML_${name} OFF PARENT_SCOPE)
    endif()
endfunction()

prove_cpu_feature(SSE42 "-msse4.2" "return (int) _mm_crc32_u32(0, argc) == 1;")
prove_cpu_feature(AVX "-mavx" "return _mm256_movemask_ps(_mm256_add_ps(_mm256_set1_ps(argc), _mm256_set1_ps(1))) != 0;")
prove_cpu_feature(AVX2 "-mavx2"
    "return _mm256_extract_epi32(_mm256_add_epi32(_mm256_set1_epi32(argc), _mm256_set1_epi32(1)), 3) != argc + 1;")
prove_cpu_feature(FMA "-mavx2 -mfma"
    "return _mm256_movemask_ps(_mm256_fmadd_ps(_mm256_set1_ps(argc), _mm256_set1_ps(1), _mm256_set1_ps(1))) != 0;")
prove_cpu_feature(F16C "-mavx -mf16c" "return _mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set1_ps(argc), 0)) == 1;")
prove_cpu_feature(BMI2 "-mbmi2" "return (int) _pdep_u32(argc, 0xff) != argc;")
prove_cpu_feature(AVX_VNNI "-mavx2 -mavxvnni"
    "return _mm256_extract_epi32(_mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(argc), _mm256_set1_epi8(1)), 0) != 4 * argc;")
prove_cpu_feature(AVX512 "-mavx512f -mavx512cd -mavx512vl -mavx512dq -mavx512bw"
    "return _mm512_reduce_add_epi32(_mm512_abs_epi8(_mm512_set1_epi8(argc))) == 0;")
if (HAVE_AVX512)
    prove_cpu_feature(AVX512_VBMI "-mavx512f -mavx512bw -mavx512vbmi"
        "return _mm512_reduce_add_epi32(_mm512_permutexvar_epi8(_mm512_set1_epi8(1), _mm512_set1_epi8(argc))) == 0;")
    prove_cpu_feature(AVX512_VNNI "-mavx512f -mavx512vnni"
        "return _mm512_reduce_add_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(argc), _mm512_set1_epi8(1))) == 0;")
    prove_cpu_feature(AVX512_BF16 "-mavx512f -mavx512vl -mavx512bf16"
        "return _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), _mm512_cvtne2ps_pbh(_mm512_set1_ps(argc), _mm512_set1_ps(1)), _mm512_cvtne2ps_pbh(_mm512_set1_ps(1), _mm512_set1_ps(1)))) == 0;")
endif()
message(STATUS "CPU features used: ${EXPERT_PACK_CPU_FEATURES}")

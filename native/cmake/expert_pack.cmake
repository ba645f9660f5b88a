# Our sources inside the patched libraries, the cffi modules, and what is installed.
#
# Only the files that need our headers get their folders: the others compile exactly as in stock, and a compiler cache
# serves both builds.
set(our_folders ../include base trace read store claim cpu cuda server) # see src/README.md
list(TRANSFORM our_folders PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/src/)

# Further arguments: files of the room, which sees itself and the rooms before it.
function(expert_pack_sources target room)
    list(TRANSFORM ARGN PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/src/${room}/)
    target_sources(${target} PRIVATE ${ARGN})
    list(FIND our_folders ${CMAKE_CURRENT_SOURCE_DIR}/src/${room} last)
    math(EXPR n_folders "${last} + 1")
    list(SUBLIST our_folders 0 ${n_folders} folders)
    if (room STREQUAL read)
        list(APPEND folders ${LLAMA_CPP_DIR}/vendor/hash) # xxhash
    elseif (room STREQUAL cuda)
        list(APPEND folders ${LLAMA_CPP_DIR}/ggml/src/ggml-cuda)
    endif()
    set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES INCLUDE_DIRECTORIES "${folders}")
endfunction()

function(patched_sources target)
    list(TRANSFORM ARGN PREPEND ${LLAMA_CPP_DIR}/)
    set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES INCLUDE_DIRECTORIES "${our_folders}")
endfunction()

expert_pack_sources(ggml-base base expert_error.cpp)
expert_pack_sources(ggml-base trace expert_trace.cpp)
expert_pack_sources(ggml-base read expert_loader.cpp expert_read.cpp expert_trust.cpp)
expert_pack_sources(ggml-base store
    expert_acquire.cpp expert_ahead.cpp expert_arena.cpp expert_fetch.cpp expert_host_slots.cpp expert_in_place.cpp expert_mover.cpp
    expert_planner.cpp expert_progress.cpp expert_registry.cpp expert_slots.cpp)
expert_pack_sources(ggml-base claim expert_buffer.cpp)
expert_pack_sources(llama claim llama_expert.cpp llama_expert_context.cpp)
patched_sources(ggml-cpu ggml/src/ggml-cpu/ggml-cpu.c ggml/src/ggml-cpu/ggml-cpu.cpp)
patched_sources(llama src/llama-model-loader.cpp src/llama-adapter.cpp)
expert_pack_sources(llama-common server expert_args.cpp expert_params.cpp expert_request.cpp expert_session.cpp)
patched_sources(llama-common common/arg.cpp common/common.cpp)
patched_sources(server-context
    tools/server/server-common.cpp tools/server/server-context.cpp tools/server/server-queue.cpp
    tools/server/server-task.cpp)
expert_pack_sources(llama-server-impl server expert_main.cpp expert_signals.cpp)
patched_sources(llama-server-impl tools/server/server.cpp tools/server/server-models.cpp)
if (EXPERT_PACK_CUDA)
    expert_pack_sources(ggml-cuda cuda
        expert_cuda.cu expert_cuda_gate.cu expert_cuda_kernels.cu expert_cuda_lookup.cu expert_cuda_move.cu
        expert_cuda_segments.cu)
    patched_sources(ggml-cuda
        ggml/src/ggml-cuda/ggml-cuda.cu ggml/src/ggml-cuda/mmq.cu ggml/src/ggml-cuda/mmvq.cu
        ggml/src/ggml-cuda/mmvf.cu ggml/src/ggml-cuda/mmf.cu)
endif()

# The ABIs for Python, in API mode from the headers that C++ compiles. Further arguments: the libraries of a module.
function(bridge_module name header)
    set(header ${CMAKE_CURRENT_SOURCE_DIR}/include/${header})
    set(generator ${CMAKE_CURRENT_SOURCE_DIR}/build_provider.py)
    set(out ${CMAKE_BINARY_DIR}/${name}.c)
    add_custom_command(
        OUTPUT ${out} COMMAND ${Python_EXECUTABLE} ${generator} ${name} ${header} ${out} DEPENDS ${header} ${generator})
    Python_add_library(${name} MODULE WITH_SOABI ${out})
    target_include_directories(${name} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/include)
    target_link_libraries(${name} PRIVATE ${ARGN})
    set_target_properties(${name} PROPERTIES INSTALL_RPATH "$ORIGIN/lib")
    install(TARGETS ${name} LIBRARY DESTINATION llama_expert_pack/bridge)
endfunction()
bridge_module(_provider expert_provider.h ggml-base)
bridge_module(_server expert_server.h llama-server-impl)

set(libraries ggml-base ggml-cpu ggml llama llama-common mtmd llama-server-impl)
set(cuda false)
if (EXPERT_PACK_CUDA)
    list(APPEND libraries ggml-cuda)
    set(cuda true)
endif()
add_custom_target(expert_pack_libraries ALL DEPENDS ${libraries})

# what bridge checks before it loads anything
list(JOIN EXPERT_PACK_CPU_FEATURES "\", \"" features)
file(WRITE ${CMAKE_BINARY_DIR}/build_info.json
    "{\"source\": \"${LLAMA_CPP_PIN}\", \"cpu_features\": [\"${features}\"], \"cuda\": ${cuda}}\n")

foreach (library ${libraries})
    # one file a library: wheels hold no links, and llama-cpp-python opens the plain name
    set_property(TARGET ${library} PROPERTY VERSION)
    set_property(TARGET ${library} PROPERTY SOVERSION)
    install(FILES $<TARGET_FILE:${library}> DESTINATION llama_expert_pack/bridge/lib)
endforeach()
install(FILES ${CMAKE_BINARY_DIR}/build_info.json DESTINATION llama_expert_pack/bridge/lib)
